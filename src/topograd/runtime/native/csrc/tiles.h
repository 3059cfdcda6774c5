// Products of panels of weights with up to TILE rows, for each format of weights. Included once per instruction set.
//
// A panel is 8 outputs. Every step takes 8 bytes of activations of a row and as many inputs of each output: a
// vector is 8 outputs × 8 bytes, of which two numbers are summed side by side (`vectors.h`) and added at the end.
// So each sum has one order, however many rows and threads there are and for both instruction sets.
//
//     float32    steps of 8 outputs × 2 floats              acc ← fma(w, x)
//     bfloat16   the upper halves of the same               the same: widened exactly
//     int8       a block: 8 scales (f16), 8 steps of 8 outputs × 4 inputs; activations of 16 bits
//     int4       a block: 8 scales (f16), 8 minima (f16) if it has them, 2 times 8 outputs × 8 bytes, the low
//                halves inputs 0..15 of the block and the high ones 16..31; activations of 8 bits
//     grid       a block: for each half of it 8 scales and 8 minima (float32), then as int8
//
// Integer sums of half a block are exact (127 · 32767 · 16 < 2^31; 15 · 127 · 8 < 2^15).

// Activations of R ≤ TILE rows, side by side: [step][row], so that one pointer reaches all rows.
struct Chunk {
    const int64_t *units;   // pairs of floats, quadruples of int16, or eight int8
    const float *scale;     // of a block
    const float *sum;       // scale · Σ codes of a block, for grids of each half of it
};

constexpr int64_t block_bytes(Format f) {
    return f == GRID ? 128 + 256 : f == INT8 ? 16 + 256 : f == INT4 ? 16 + 128 : 32 + 128;
}

inline bool narrow_codes(Format f) { return f == INT4 || f == INT4_MINIMA; }

inline int64_t blocks_of(int64_t inputs) { return (inputs + BLOCK - 1) / BLOCK; }

// Units of activations that a row of so many numbers has.
inline int64_t steps_of(Format f, int64_t inputs) {
    if (f == FLOAT32 || f == BFLOAT16) return (inputs + 1) / 2;
    return blocks_of(inputs) * (narrow_codes(f) ? 4 : 8);
}

inline int64_t panel_bytes(const Matrix &m) {
    if (m.format == FLOAT32) return steps_of(m.format, m.inputs) * LANES * 8;
    if (m.format == BFLOAT16) return steps_of(m.format, m.inputs) * LANES * 4;
    return blocks_of(m.inputs) * block_bytes(m.format);
}

inline __m256 halves(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }

inline void prefetch(const uint8_t *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }

// P panels with R rows: y[panel][row][lane].
template <bool HALF, int R, int P> void float_tile(const uint8_t *w, int64_t panel, int64_t steps, const int64_t *x, float *y) {
    constexpr int STEP = HALF ? 32 : 64;
    Floats acc[P][R];
    for (int p = 0; p < P; p++)
        for (int r = 0; r < R; r++) acc[p][r] = no_floats();
    for (int64_t i = 0; i < steps; i++, w += STEP, x += R) {
        for (int p = 0; p < P; p++) prefetch(w + p * panel + AHEAD);
        Floats v[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) v[p] = HALF ? widened(w + p * panel) : floats_at(w + p * panel);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            Unit u = unit(x + r);
#pragma GCC unroll 8
            for (int p = 0; p < P; p++) acc[p][r] = fused(v[p], u, acc[p][r]);
        }
    }
    for (int p = 0; p < P; p++)
        for (int r = 0; r < R; r++) _mm256_storeu_ps(y + (p * R + r) * LANES, folded(acc[p][r]));
}

template <int R> void int8_tile(const uint8_t *w, int64_t blocks, const Chunk &x, float *y) {
    Floats acc[R];
    for (int r = 0; r < R; r++) acc[r] = no_floats();
    const int64_t *units = x.units;
    for (int64_t b = 0; b < blocks; b++, w += block_bytes(INT8), units += 8 * R) {
        Ints sum[R];
        for (int r = 0; r < R; r++) sum[r] = no_ints();
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            if (!(g & 1)) prefetch(w + AHEAD + 32 * g);
            Ints v = words(w + 16 + 32 * g);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sum[r] = by_words(sum[r], v, unit(units + g * R + r));
        }
        Floats scale = doubled(halves(w));
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r] = scaled(sum[r], scale, x.scale[b * R + r], acc[r]);
    }
    for (int r = 0; r < R; r++) _mm256_storeu_ps(y + r * LANES, folded(acc[r]));
}

// Codes of 0..127 with a scale and a minimum for 16 inputs: what K-quants are made of.
template <int R> void grid_tile(const uint8_t *w, int64_t blocks, const Chunk &x, float *y) {
    Floats acc[R];
    __m256 lower[R];
    for (int r = 0; r < R; r++) acc[r] = no_floats(), lower[r] = _mm256_setzero_ps();
    const int64_t *units = x.units;
    for (int64_t b = 0; b < 2 * blocks; b++, units += 4 * R) {
        const uint8_t *half = w + b / 2 * block_bytes(GRID), *head = half + b % 2 * 64;
        Ints sum[R];
        for (int r = 0; r < R; r++) sum[r] = no_ints();
        for (int i = 0; i < 3; i++) prefetch(head + AHEAD + 64 * i);
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++) {
            Ints v = words(half + 128 + b % 2 * 128 + 32 * g);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sum[r] = by_words(sum[r], v, unit(units + g * R + r));
        }
        Floats scale = doubled(_mm256_loadu_ps((const float *)head));
        __m256 least = _mm256_loadu_ps((const float *)head + LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            acc[r] = scaled(sum[r], scale, x.scale[b / 2 * R + r], acc[r]);
            lower[r] = _mm256_fmadd_ps(least, _mm256_broadcast_ss(x.sum + b * R + r), lower[r]);
        }
    }
    for (int r = 0; r < R; r++) _mm256_storeu_ps(y + r * LANES, _mm256_add_ps(folded(acc[r]), lower[r]));
}

template <bool MINIMA, int R> void int4_tile(const uint8_t *w, int64_t blocks, const Chunk &x, float *y) {
    constexpr int HEADER = MINIMA ? 32 : 16;
    Floats acc[R];
    __m256 lower[R];
    for (int r = 0; r < R; r++) acc[r] = no_floats(), lower[r] = _mm256_setzero_ps();
    const int64_t *units = x.units;
    for (int64_t b = 0; b < blocks; b++, w += HEADER + 128, units += 4 * R) {
        Ints sum[R];
        for (int r = 0; r < R; r++) sum[r] = no_ints();
        prefetch(w + AHEAD), prefetch(w + AHEAD + 64), prefetch(w + AHEAD + 128);
#pragma GCC unroll 2
        for (int g = 0; g < 2; g++) {
            Ints v = bytes_at(w + HEADER + 64 * g), low = low_nibbles(v), high = high_nibbles(v);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                sum[r] = by_bytes(sum[r], low, unit(units + g * R + r));
                sum[r] = by_bytes(sum[r], high, unit(units + (g + 2) * R + r));
            }
        }
        __m256 d = halves(w), least = MINIMA ? halves(w + 16) : _mm256_mul_ps(d, _mm256_set1_ps(-8));
        Floats scale = doubled(d);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            acc[r] = scaled(bytes_total(sum[r]), scale, x.scale[b * R + r], acc[r]);
            lower[r] = _mm256_fmadd_ps(least, _mm256_broadcast_ss(x.sum + b * R + r), lower[r]);
        }
    }
    for (int r = 0; r < R; r++) _mm256_storeu_ps(y + r * LANES, _mm256_add_ps(folded(acc[r]), lower[r]));
}

// `panels` panels of a matrix from `first` on, with R rows: y[panel][row][lane].
template <int R> void multiply_rows(const Matrix &m, int64_t first, int panels, const Chunk &x, float *y) {
    constexpr int P = panels_of(R);
    int64_t bytes = panel_bytes(m), blocks = blocks_of(m.inputs), steps = steps_of(m.format, m.inputs);
    for (int p = 0; p < panels;) {
        const uint8_t *w = m.data + (first + p) * bytes;
        float *to = y + p * R * LANES;
        int done = 1;
        switch (m.format) {
        case FLOAT32:
            if (panels - p >= P) float_tile<false, R, P>(w, bytes, steps, x.units, to), done = P;
            else float_tile<false, R, 1>(w, bytes, steps, x.units, to);
            break;
        case BFLOAT16:
            if (panels - p >= P) float_tile<true, R, P>(w, bytes, steps, x.units, to), done = P;
            else float_tile<true, R, 1>(w, bytes, steps, x.units, to);
            break;
        case INT8: int8_tile<R>(w, blocks, x, to); break;
        case INT4: int4_tile<false, R>(w, blocks, x, to); break;
        case INT4_MINIMA: int4_tile<true, R>(w, blocks, x, to); break;
        case GRID: grid_tile<R>(w, blocks, x, to); break;
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
#if TILE_ROWS > 6
    case 7: return multiply_rows<7>(m, first, panels, x, y);
    case 8: return multiply_rows<8>(m, first, panels, x, y);
#endif
    }
}
