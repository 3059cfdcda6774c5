// Vectors of 8 outputs × 8 bytes: one register with AVX-512, two with AVX2. Included once per instruction set.
//
// A result has two numbers for each output, which `folded` adds.

#ifdef WITH_VNNI

#define TILE_ROWS 8
constexpr int panels_of(int rows) { return rows < 3 ? 1 : rows < 5 ? 4 : 2; } // of floats that rows meet at once
using Floats = __m512;
using Ints = __m512i;
using Unit = __m512i; // the same 8 bytes for all outputs

inline Floats no_floats() { return _mm512_setzero_ps(); }
inline Ints no_ints() { return _mm512_setzero_si512(); }
inline Unit unit(const int64_t *x) { return _mm512_set1_epi64(*x); }
inline Floats floats_at(const uint8_t *p) { return _mm512_loadu_ps((const float *)p); }
inline Floats widened(const uint8_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
inline Floats fused(Floats w, Unit x, Floats acc) { return _mm512_fmadd_ps(w, _mm512_castsi512_ps(x), acc); }
inline Ints words(const uint8_t *p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p)); }
inline Ints by_words(Ints sum, Ints w, Unit x) { return _mm512_dpwssd_epi32(sum, w, x); }
inline Ints bytes_at(const uint8_t *p) { return _mm512_loadu_si512(p); }
inline Ints low_nibbles(Ints v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Ints high_nibbles(Ints v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
inline Ints by_bytes(Ints sum, Ints w, Unit x) { return _mm512_dpbusd_epi32(sum, w, x); }
inline Ints bytes_total(Ints sum) { return sum; }
inline Floats doubled(__m256 v) {
    const __m512i twice = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    return _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(v));
}
inline Floats scaled(Ints sum, Floats scale, float by, Floats acc) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scale, _mm512_set1_ps(by)), acc);
}
inline __m256 low_half(Floats v) { return _mm512_castps512_ps256(v); }
inline __m256 high_half(Floats v) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)); }

#else

#define TILE_ROWS 6
constexpr int panels_of(int) { return 1; }
struct Floats {
    __m256 low, high;
};
struct Ints {
    __m256i low, high;
};
using Unit = __m256i;

inline Floats no_floats() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Ints no_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Unit unit(const int64_t *x) { return _mm256_set1_epi64x(*x); }
inline Floats floats_at(const uint8_t *p) {
    return {_mm256_loadu_ps((const float *)p), _mm256_loadu_ps((const float *)(p + 32))};
}
inline __m256 widened_half(const uint8_t *p) {
    __m256i v = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
}
inline Floats widened(const uint8_t *p) { return {widened_half(p), widened_half(p + 16)}; }
inline Floats fused(Floats w, Unit x, Floats acc) {
    __m256 v = _mm256_castsi256_ps(x);
    return {_mm256_fmadd_ps(w.low, v, acc.low), _mm256_fmadd_ps(w.high, v, acc.high)};
}
inline Ints words(const uint8_t *p) {
    const __m128i *from = (const __m128i *)p;
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(from)), _mm256_cvtepi8_epi16(_mm_loadu_si128(from + 1))};
}
inline Ints by_words(Ints sum, Ints w, Unit x) {
    return {_mm256_add_epi32(sum.low, _mm256_madd_epi16(w.low, x)), _mm256_add_epi32(sum.high, _mm256_madd_epi16(w.high, x))};
}
inline Ints bytes_at(const uint8_t *p) {
    const __m256i *from = (const __m256i *)p;
    return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
}
inline Ints low_nibbles(Ints v) {
    const __m256i low = _mm256_set1_epi8(15);
    return {_mm256_and_si256(v.low, low), _mm256_and_si256(v.high, low)};
}
inline Ints high_nibbles(Ints v) { return low_nibbles({_mm256_srli_epi16(v.low, 4), _mm256_srli_epi16(v.high, 4)}); }
// Sums of 16 bits, which `bytes_total` adds by pairs.
inline Ints by_bytes(Ints sum, Ints w, Unit x) {
    return {_mm256_add_epi16(sum.low, _mm256_maddubs_epi16(w.low, x)), _mm256_add_epi16(sum.high, _mm256_maddubs_epi16(w.high, x))};
}
inline Ints bytes_total(Ints sum) {
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(sum.low, one), _mm256_madd_epi16(sum.high, one)};
}
inline Floats doubled(__m256 v) {
    return {_mm256_permutevar8x32_ps(v, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
            _mm256_permutevar8x32_ps(v, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7))};
}
inline __m256 scaled_half(__m256i sum, __m256 scale, float by, __m256 acc) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(scale, _mm256_set1_ps(by)), acc);
}
inline Floats scaled(Ints sum, Floats scale, float by, Floats acc) {
    return {scaled_half(sum.low, scale.low, by, acc.low), scaled_half(sum.high, scale.high, by, acc.high)};
}
inline __m256 low_half(Floats v) { return v.low; }
inline __m256 high_half(Floats v) { return v.high; }

#endif

constexpr int TILE = TILE_ROWS; // rows that a panel meets at once
constexpr int AHEAD = 256;      // bytes that are asked for before they are read

// The two numbers of each output, added.
inline __m256 folded(Floats v) {
    __m256 sums = _mm256_hadd_ps(low_half(v), high_half(v));
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(sums), 0xD8));
}
