// What happens to single rows between the matrices: norms, activations, and rows laid out for tiles.
// Included once per instruction set. Every sum has one order.

inline float lanes_sum(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

inline float dot(const float *a, const float *b, int64_t n) {
    __m256 even = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        even = _mm256_fmadd_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i), even);
        odd = _mm256_fmadd_ps(_mm256_loadu_ps(a + i + 8), _mm256_loadu_ps(b + i + 8), odd);
    }
    float sum = lanes_sum(_mm256_add_ps(even, odd));
    for (; i < n; i++) sum += a[i] * b[i];
    return sum;
}

// q · key of 8 keys, which lie one behind the other; the last of `count` stands for those that are missing.
inline __m256 dots(const float *q, const float *keys, int64_t count, int64_t n) {
    const float *key[LANES];
    __m256 acc[LANES];
    for (int j = 0; j < LANES; j++) key[j] = keys + std::min<int64_t>(j, count - 1) * n, acc[j] = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        __m256 v = _mm256_loadu_ps(q + i);
#pragma GCC unroll 8
        for (int j = 0; j < LANES; j++) acc[j] = _mm256_fmadd_ps(v, _mm256_loadu_ps(key[j] + i), acc[j]);
    }
    __m256 first = _mm256_hadd_ps(_mm256_hadd_ps(acc[0], acc[1]), _mm256_hadd_ps(acc[2], acc[3]));
    __m256 second = _mm256_hadd_ps(_mm256_hadd_ps(acc[4], acc[5]), _mm256_hadd_ps(acc[6], acc[7]));
    __m256 sum = _mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20), _mm256_permute2f128_ps(first, second, 0x31));
    for (; i < n; i++) {
        float last[LANES];
        for (int j = 0; j < LANES; j++) last[j] = key[j][i];
        sum = _mm256_fmadd_ps(_mm256_set1_ps(q[i]), _mm256_loadu_ps(last), sum);
    }
    return sum;
}

// exp to about one unit in the last place (Cephes); 0 below -87.3.
inline __m256 exponential(__m256 x) {
    const __m256 least = _mm256_set1_ps(-87.3f);
    __m256 small = _mm256_cmp_ps(x, least, _CMP_LT_OQ);
    x = _mm256_min_ps(_mm256_set1_ps(88.3f), _mm256_max_ps(least, x)); // in this order: NaN stays NaN
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    x = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    x = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), x);
    const float c[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    __m256 y = _mm256_set1_ps(c[0]);
    for (int i = 1; i < 6; i++) y = _mm256_fmadd_ps(y, x, _mm256_set1_ps(c[i]));
    y = _mm256_add_ps(_mm256_fmadd_ps(y, _mm256_mul_ps(x, x), x), _mm256_set1_ps(1));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_andnot_ps(small, _mm256_mul_ps(y, _mm256_castsi256_ps(power)));
}

// x / (1 + exp(-s)).
inline __m256 gated_by_sigmoid(__m256 x, __m256 s) {
    __m256 e = exponential(_mm256_sub_ps(_mm256_setzero_ps(), s));
    return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1), e));
}

// c tanh(x / c) = c (1 - 2 / (1 + exp(2 x / c))).
inline __m256 capped(__m256 x, float c) {
    __m256 e = exponential(_mm256_mul_ps(x, _mm256_set1_ps(2 / c)));
    __m256 t = _mm256_div_ps(_mm256_set1_ps(2), _mm256_add_ps(_mm256_set1_ps(1), e));
    return _mm256_mul_ps(_mm256_set1_ps(c), _mm256_sub_ps(_mm256_set1_ps(1), t));
}

inline __m256 activate(__m256 x, Activation kind) {
    switch (kind) {
    case SILU: return gated_by_sigmoid(x, x);
    case GELU_TANH: { // 0.5 x (1 + tanh(u)) = x sigmoid(2 u)
        __m256 cube = _mm256_mul_ps(_mm256_mul_ps(x, x), x);
        __m256 u = _mm256_fmadd_ps(cube, _mm256_set1_ps(0.044715f), x);
        return gated_by_sigmoid(x, _mm256_mul_ps(u, _mm256_set1_ps(1.5957691216057308f)));
    }
    case GELU: {
        float v[LANES];
        _mm256_storeu_ps(v, x);
        for (float &e : v) e = 0.5f * e * (1 + std::erf(e * 0.70710678118654752f));
        return _mm256_loadu_ps(v);
    }
    default: {
        x = _mm256_max_ps(_mm256_setzero_ps(), x);
        return kind == RELU2 ? _mm256_mul_ps(x, x) : x;
    }
    }
}

// norm(x) over n numbers; `to` may be x.
inline void normalize(const Norm &norm, const float *x, int64_t n, float *to) {
    float mean = 0;
    if (norm.kind == LAYER) {
        double sum = 0;
        for (int64_t i = 0; i < n; i++) sum += x[i];
        mean = float(sum / n);
        for (int64_t i = 0; i < n; i++) to[i] = x[i] - mean;
        x = to;
    }
    float factor = 1 / std::sqrt(dot(x, x, n) / n + norm.epsilon);
    for (int64_t i = 0; i < n; i++) to[i] = x[i] * factor;
    if (norm.gain)
        for (int64_t i = 0; i < n; i++) to[i] *= norm.gain[i];
    if (norm.shift)
        for (int64_t i = 0; i < n; i++) to[i] += norm.shift[i];
}

// Rotates the pairs (x_i, x_{i + half}) of a head.
inline void rotate(float *x, const float *cosine, const float *sine, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
    }
}

// Codes of a block of n ≤ 32 numbers, at most `limit` in size; returns its scale, NaN where a number
// is not finite. Missing ones are 0.
inline float quantize_block(const float *x, int64_t n, float limit, int32_t *codes) {
    float full[BLOCK] = {};
    if (n < BLOCK) x = std::copy(x, x + n, full) - n;
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 most = _mm256_setzero_ps(), nothing = most;
    for (int i = 0; i < BLOCK; i += LANES) {
        __m256 v = _mm256_loadu_ps(x + i);
        most = _mm256_max_ps(_mm256_andnot_ps(sign, v), most);
        nothing = _mm256_fmadd_ps(v, _mm256_setzero_ps(), nothing);
    }
    if (_mm256_movemask_ps(_mm256_cmp_ps(nothing, nothing, _CMP_UNORD_Q))) {
        std::fill(codes, codes + BLOCK, 0);
        return NAN;
    }
    float lane[LANES];
    _mm256_storeu_ps(lane, most);
    float largest = *std::max_element(lane, lane + LANES), inverse = largest > 0 ? limit / largest : 0;
    if (!std::isfinite(inverse)) inverse = 0; // nothing that a float32 can divide
    for (int i = 0; i < BLOCK; i += LANES) {
        __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(inverse));
        _mm256_storeu_si256((__m256i *)(codes + i), _mm256_cvtps_epi32(scaled));
    }
    return largest / limit;
}

// The codes of a block as 64-bit units: four of 16 bits or eight of 8 bits.
template <class Code> void narrow(const int32_t *codes, int64_t *to, int64_t stride) {
    constexpr int EACH = 8 / sizeof(Code);
    for (int g = 0; g < BLOCK / EACH; g++) {
        Code some[EACH];
        for (int i = 0; i < EACH; i++) some[i] = Code(codes[g * EACH + i]);
        std::memcpy(to + g * stride, some, 8);
    }
}

// Rows laid out for the tiles of one matrix, in chunks of TILE.
class Tiled {
  public:
    // `row(i, buffer)` gives a pointer to row i, of `inputs` numbers; it may use the buffer.
    template <class RowOf> void fill(Format format, int64_t inputs, int64_t rows, RowOf row) {
        bool floats = format == FLOAT32 || format == BFLOAT16;
        steps = steps_of(format, inputs), blocks = blocks_of(inputs);
        single.resize(inputs), units.resize(rows * steps);
        sums = format == GRID ? 2 : 1;
        if (!floats) scale.resize(rows * blocks), sum.resize(rows * blocks * sums);
        for (int64_t i = 0; i < rows; i++) {
            int64_t start = i / TILE * TILE, wide = std::min<int64_t>(TILE, rows - start), r = i - start;
            const float *v = row(i, single.data());
            int64_t *to = units.data() + start * steps + r;
            if (floats) pair(v, inputs, to, wide);
            else quantize(format, v, inputs, to, start, wide, r);
        }
    }

    Chunk chunk(int64_t start) const {
        return {units.data() + start * steps, scale.data() + start * blocks, sum.data() + start * blocks * sums};
    }

  private:
    static void pair(const float *v, int64_t inputs, int64_t *to, int64_t wide) {
        for (int64_t k = 0; k + 1 < inputs; k += 2, to += wide) std::memcpy(to, v + k, 8);
        if (inputs % 2) {
            float last[2] = {v[inputs - 1], 0};
            std::memcpy(to, last, 8);
        }
    }

    void quantize(Format format, const float *v, int64_t inputs, int64_t *to, int64_t start, int64_t wide, int64_t r) {
        float *scales = scale.data() + start * blocks + r, *totals = sum.data() + start * blocks * sums + r;
        int32_t codes[BLOCK];
        for (int64_t b = 0; b < blocks; b++, scales += wide, to += steps / blocks * wide) {
            float limit = narrow_codes(format) ? 127 : 32767;
            float s = quantize_block(v + b * BLOCK, std::min<int64_t>(BLOCK, inputs - b * BLOCK), limit, codes);
            *scales = s;
            for (int part = 0; part < sums; part++, totals += wide) {
                int32_t total = 0;
                for (int i = part * BLOCK / sums; i < (part + 1) * BLOCK / sums; i++) total += codes[i];
                *totals = s * total;
            }
            if (narrow_codes(format)) narrow<int8_t>(codes, to, wide);
            else narrow<int16_t>(codes, to, wide);
        }
    }

    std::vector<float> scale, sum, single;
    std::vector<int64_t> units;
    int64_t steps = 0, blocks = 0;
    int sums = 1; // of a block
};

// What a thread has of some units.
struct Share {
    int64_t first, last;
};

inline Share share(int64_t count, int thread, int threads) {
    return {count * thread / threads, count * (thread + 1) / threads};
}
