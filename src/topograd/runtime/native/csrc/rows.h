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

// exp to about one unit in the last place (Cephes); 0 below -87.3.
inline __m256 exponential(__m256 x) {
    const __m256 least = _mm256_set1_ps(-87.3f);
    __m256 small = _mm256_cmp_ps(x, least, _CMP_LT_OQ);
    x = _mm256_min_ps(_mm256_max_ps(x, least), _mm256_set1_ps(88.3f));
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
        x = _mm256_max_ps(x, _mm256_setzero_ps());
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

// Codes of a block of n ≤ 32 numbers, at most `limit` in size; returns its scale. Missing ones are 0.
inline float quantize_block(const float *x, int64_t n, float limit, int32_t *codes) {
    float largest = 0;
    for (int64_t i = 0; i < n; i++) largest = std::max(largest, std::fabs(x[i]));
    float inverse = largest > 0 ? limit / largest : 0;
    if (!std::isfinite(inverse)) inverse = 0; // nothing that a float32 can divide
    for (int64_t i = 0; i < BLOCK; i++) codes[i] = i < n ? _mm_cvtss_si32(_mm_set_ss(x[i] * inverse)) : 0;
    return largest / limit;
}

// Rows laid out for the tiles of one matrix, in chunks of 8.
class Tiled {
  public:
    // `row(i, buffer)` gives a pointer to row i, of `inputs` numbers; it may use the buffer.
    template <class RowOf> void fill(Format format, int64_t inputs, int64_t rows, RowOf row) {
        int64_t blocks = (inputs + BLOCK - 1) / BLOCK;
        bool floats = format == FLOAT32 || format == BFLOAT16;
        per_row = floats ? inputs : blocks * (format == INT8 ? 16 : 8);
        blocks_per_row = blocks;
        single.resize(inputs);
        if (floats) x.resize(rows * inputs);
        else codes.resize(rows * per_row), scale.resize(rows * blocks), sum.resize(rows * blocks);
        for (int64_t i = 0; i < rows; i++) {
            int64_t start = i / TILE * TILE, wide = std::min<int64_t>(TILE, rows - start), r = i - start;
            const float *v = row(i, single.data());
            if (floats) {
                float *to = x.data() + start * inputs + r;
                for (int64_t k = 0; k < inputs; k++) to[k * wide] = v[k];
            } else quantize(format, v, inputs, start, wide, r);
        }
    }

    Chunk chunk(int64_t start) const {
        int64_t b = start * blocks_per_row;
        return {x.data() + start * per_row, codes.data() + start * per_row, scale.data() + b, sum.data() + b};
    }

  private:
    void quantize(Format format, const float *v, int64_t inputs, int64_t start, int64_t wide, int64_t r) {
        int64_t first = start * blocks_per_row + r;
        int32_t *to = codes.data() + start * per_row + r, block[BLOCK];
        for (int64_t b = 0; b < blocks_per_row; b++) {
            float s = quantize_block(v + b * BLOCK, std::min<int64_t>(BLOCK, inputs - b * BLOCK), format == INT8 ? 32767 : 127, block);
            int32_t total = 0;
            for (int32_t c : block) total += c;
            scale[first + b * wide] = s, sum[first + b * wide] = s * total;
            if (format == INT8)
                for (int g = 0; g < 16; g++, to += wide)
                    *to = (block[2 * g] & 0xffff) | int32_t(uint32_t(block[2 * g + 1]) << 16);
            else
                for (int g = 0; g < 8; g++, to += wide)
                    *to = (block[4 * g] & 0xff) | (block[4 * g + 1] & 0xff) << 8 | (block[4 * g + 2] & 0xff) << 16 |
                          int32_t(uint32_t(block[4 * g + 3]) << 24);
        }
    }

    std::vector<float> x, scale, sum, single;
    std::vector<int32_t> codes;
    int64_t per_row = 0, blocks_per_row = 0;
};
