// Rows of floats to panels (`packing.py`): (panels, inputs / 2, 8, 2).
#pragma once

// Of 16 numbers the codes 0..levels, scale and minimum of a grid that they all lie on; false where there is none.
inline bool find_grid(const float *w, int levels, uint8_t *codes, float &scale, float &least) {
    float high = *std::max_element(w, w + BLOCK / 2);
    least = *std::min_element(w, w + BLOCK / 2), scale = 0;
    std::fill(codes, codes + BLOCK / 2, 0);
    if (!(high > least)) return high == least;
    for (int n = 1; n <= levels; n++) {
        double step = (double(high) - least) / n;
        double rounding = std::max(std::fabs(high), std::fabs(least)) / (step * (1 << 22)); // of the numbers given
        double allowed = std::min(0.25, std::max(1e-3, rounding));
        int i = 0;
        for (; i < BLOCK / 2; i++) {
            double at = (w[i] - double(least)) / step, code = std::nearbyint(at);
            if (std::fabs(at - code) > allowed) break;
            codes[i] = uint8_t(code);
        }
        scale = float(step);
        if (i == BLOCK / 2) return true;
    }
    return false;
}

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
