// Products of panels of weights with up to 8 rows, for each format of weights. Included once per instruction set.
//
// A panel is 8 outputs; a lane of a vector is an output, so that nothing is summed across lanes, and each sum
// has one order (inputs from first to last) however many rows and threads there are.
//
//     float32    k × 8 floats                            acc ← fma(w, x)
//     bfloat16   k × 8 upper halves of floats            the same: widened exactly
//     int8       a block: 8 scales (f16), 16 groups of 8 outputs × 2 inputs; activations of 16 bits
//     int4       a block: 8 scales (f16), 8 minima (f16) if it has them, 4 groups of 8 outputs × 4 inputs, the low
//                halves inputs 0..15 of the block and the high ones 16..31; activations of 8 bits
//
// Integer sums of a block are exact (127 · 32767 · 32 < 2^31; 15 · 127 · 16 < 2^15), so instruction sets agree.

// Activations of R ≤ 8 rows, side by side: [step][row], so that one pointer reaches all rows.
struct Chunk {
    const float *x;         // floats
    const int32_t *codes;   // pairs of int16, or quadruples of int8
    const float *scale;     // of a block
    const float *sum;       // scale · Σ codes of a block
};

constexpr int64_t block_bytes(Format f) { return f == INT8 ? 16 + 256 : f == INT4 ? 16 + 128 : 32 + 128; }

inline int64_t panel_bytes(const Matrix &m) {
    if (m.format == FLOAT32) return m.inputs * LANES * 4;
    if (m.format == BFLOAT16) return m.inputs * LANES * 2;
    return (m.inputs + BLOCK - 1) / BLOCK * block_bytes(m.format);
}

inline __m256 widen(const uint8_t *p, bool half) {
    if (!half) return _mm256_loadu_ps((const float *)p);
    __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
}

inline __m256 halves(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }

inline void prefetch(const uint8_t *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }

// P panels with R rows: y[panel][row][lane].
template <bool HALF, int R, int P> void float_tile(const uint8_t *w, int64_t panel, int64_t k, const float *x, float *y) {
    constexpr int STEP = HALF ? 16 : 32;
    __m256 acc[P][R];
    for (int p = 0; p < P; p++)
        for (int r = 0; r < R; r++) acc[p][r] = _mm256_setzero_ps();
    for (int64_t i = 0; i < k; i++, w += STEP, x += R) {
        if (R > 2 && !(i & (64 / STEP - 1)))
            for (int p = 0; p < P; p++) prefetch(w + p * panel + 1024);
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            __m256 v = widen(w + p * panel, HALF);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) acc[p][r] = _mm256_fmadd_ps(v, _mm256_broadcast_ss(x + r), acc[p][r]);
        }
    }
    for (int p = 0; p < P; p++)
        for (int r = 0; r < R; r++) _mm256_storeu_ps(y + (p * R + r) * LANES, acc[p][r]);
}

inline __m256i pairs(__m256i sum, __m256i w, __m256i x) {
#ifdef WITH_VNNI
    return _mm256_dpwssd_epi32(sum, w, x);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x));
#endif
}

template <int R> void int8_tile(const uint8_t *w, int64_t blocks, const Chunk &x, float *y) {
    __m256 acc[R];
    for (int r = 0; r < R; r++) acc[r] = _mm256_setzero_ps();
    const int32_t *codes = x.codes;
    for (int64_t b = 0; b < blocks; b++, w += block_bytes(INT8)) {
        __m256i sum[R];
        for (int r = 0; r < R; r++) sum[r] = _mm256_setzero_si256();
#pragma GCC unroll 16
        for (int g = 0; g < 16; g++, codes += R) {
            if (!(g & 3)) prefetch(w + 1536 + 16 * g);
            __m256i v = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + 16 + 16 * g)));
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sum[r] = pairs(sum[r], v, _mm256_set1_epi32(codes[r]));
        }
        __m256 scale = halves(w);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            __m256 both = _mm256_mul_ps(scale, _mm256_broadcast_ss(x.scale + b * R + r));
            acc[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r]), both, acc[r]);
        }
    }
    for (int r = 0; r < R; r++) _mm256_storeu_ps(y + r * LANES, acc[r]);
}

// Nibbles (lower or upper) times four int8, added to sums of 16 bits, or with VNNI of 32.
inline __m256i fours(__m256i sum, __m256i nibbles, int32_t x) {
#ifdef WITH_VNNI
    return _mm256_dpbusd_epi32(sum, nibbles, _mm256_set1_epi32(x));
#else
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(nibbles, _mm256_set1_epi32(x)));
#endif
}

inline __m256i total(__m256i sum) {
#ifdef WITH_VNNI
    return sum;
#else
    return _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
#endif
}

template <bool MINIMA, int R> void int4_tile(const uint8_t *w, int64_t blocks, const Chunk &x, float *y) {
    constexpr int HEADER = MINIMA ? 32 : 16;
    const __m256i low = _mm256_set1_epi8(15);
    __m256 acc[R];
    for (int r = 0; r < R; r++) acc[r] = _mm256_setzero_ps();
    const int32_t *codes = x.codes;
    for (int64_t b = 0; b < blocks; b++, w += HEADER + 128, codes += 8 * R) {
        __m256i sum[R];
        for (int r = 0; r < R; r++) sum[r] = _mm256_setzero_si256();
        prefetch(w + 1024), prefetch(w + 1024 + 64), prefetch(w + 1024 + 128);
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++) {
            __m256i v = _mm256_loadu_si256((const __m256i *)(w + HEADER + 32 * g));
            __m256i a = _mm256_and_si256(v, low), c = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                sum[r] = fours(sum[r], a, codes[g * R + r]);
                sum[r] = fours(sum[r], c, codes[(g + 4) * R + r]);
            }
        }
        __m256 scale = halves(w), least = MINIMA ? halves(w + 16) : _mm256_mul_ps(scale, _mm256_set1_ps(-8));
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            __m256 both = _mm256_mul_ps(scale, _mm256_broadcast_ss(x.scale + b * R + r));
            acc[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total(sum[r])), both, acc[r]);
            acc[r] = _mm256_fmadd_ps(least, _mm256_broadcast_ss(x.sum + b * R + r), acc[r]);
        }
    }
    for (int r = 0; r < R; r++) _mm256_storeu_ps(y + r * LANES, acc[r]);
}

// `panels` panels of a matrix from `first` on, with R rows: y[panel][row][lane].
template <int R> void multiply_rows(const Matrix &m, int64_t first, int panels, const Chunk &x, float *y) {
    constexpr int P = R <= 2 ? 4 : R <= 4 ? 2 : 1; // panels at once, as many sums as registers hold
    int64_t bytes = panel_bytes(m), blocks = (m.inputs + BLOCK - 1) / BLOCK;
    for (int p = 0; p < panels;) {
        const uint8_t *w = m.data + (first + p) * bytes;
        float *to = y + p * R * LANES;
        int done = 1;
        switch (m.format) {
        case FLOAT32:
            if (panels - p >= P) float_tile<false, R, P>(w, bytes, m.inputs, x.x, to), done = P;
            else float_tile<false, R, 1>(w, bytes, m.inputs, x.x, to);
            break;
        case BFLOAT16:
            if (panels - p >= P) float_tile<true, R, P>(w, bytes, m.inputs, x.x, to), done = P;
            else float_tile<true, R, 1>(w, bytes, m.inputs, x.x, to);
            break;
        case INT8: int8_tile<R>(w, blocks, x, to); break;
        case INT4: int4_tile<false, R>(w, blocks, x, to); break;
        case INT4_MINIMA: int4_tile<true, R>(w, blocks, x, to); break;
        }
        p += done;
    }
}

inline void multiply(const Matrix &m, int64_t first, int panels, int rows, const Chunk &x, float *y) {
    switch (rows) {
    case 1: return multiply_rows<1>(m, first, panels, x, y);
    case 2: return multiply_rows<2>(m, first, panels, x, y);
    case 3: return multiply_rows<3>(m, first, panels, x, y);
    case 4: return multiply_rows<4>(m, first, panels, x, y);
    case 5: return multiply_rows<5>(m, first, panels, x, y);
    case 6: return multiply_rows<6>(m, first, panels, x, y);
    case 7: return multiply_rows<7>(m, first, panels, x, y);
    default: return multiply_rows<8>(m, first, panels, x, y);
    }
}
