// Rows of floats to panels (`packing.py`): (panels, inputs / 2, 8, 2).
#pragma once

inline void number_to(float v, float *to) { *to = v; }

// The upper half of a float, rounded to the nearest, ties to even; NaN stays NaN.
inline void number_to(float v, uint16_t *to) {
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    *to = v != v ? uint16_t(bits >> 16 | 64) : uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

template <class Number> void fill_panels(const float *const *rows, int64_t panels, int64_t inputs, Number *to) {
    for (int64_t p = 0; p < panels; p++, rows += LANES)
        for (int64_t k = 0; k < inputs; k += 2)
            for (int o = 0; o < LANES; o++, to += 2) {
                number_to(rows[o] ? rows[o][k] : 0, to);
                number_to(rows[o] && k + 1 < inputs ? rows[o][k + 1] : 0, to + 1);
            }
}
