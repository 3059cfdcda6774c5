// Entry points of the native backend, for ctypes. The code is compiled for two instruction sets; which of
// them runs is asked of the processor. No -ffast-math, no contraction: fused products are written out.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <vector>

#include "layout.h"
#include "panels.h"
#include "threads.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#include "vectors.h"
#include "tiles.h"
#include "rows.h"
#include "mamba.h"
#include "stage.h"
} // namespace avx2
#undef TILE_ROWS
#pragma GCC pop_options

#define WITH_VNNI
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")
namespace vnni {
#include "vectors.h"
#include "tiles.h"
#include "rows.h"
#include "mamba.h"
#include "stage.h"
} // namespace vnni
#pragma GCC pop_options

extern "C" {

// 0: this processor cannot run it; 1: AVX2; 2: AVX-512 with VNNI.
int64_t topograd_level() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return 0;
    bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    return wide ? 2 : 1;
}

// Both check nothing: `library.py` does. Level as above.
void topograd_stage(const Run *run, int64_t level) { level == 2 ? vnni::stage(*run) : avx2::stage(*run); }

void topograd_readout(const Readout *out, int64_t level) { level == 2 ? vnni::readout(*out) : avx2::readout(*out); }

// Rows of floats, which may lie anywhere, to panels: null is a row of zeros. `half`: in bfloat16.
void topograd_panels(const float *const *rows, int64_t panels, int64_t inputs, int64_t half, void *to) {
    half ? fill_panels(rows, panels, inputs, (uint16_t *)to) : fill_panels(rows, panels, inputs, (float *)to);
}

void topograd_read(const uint8_t *from, int64_t bytes, int64_t threads) { avx2::read_plainly(from, bytes, int(threads)); }

// Grids of `count` times 16 numbers; returns how many were found before the first that has none.
int64_t topograd_grids(const float *w, int64_t count, int64_t levels, uint8_t *codes, float *scale, float *least) {
    int64_t i = 0;
    while (i < count && find_grid(w + 16 * i, int(levels), codes + 16 * i, scale[i], least[i])) i++;
    return i;
}

// Bytes of the structures, so that Python's copies of them can be compared.
int64_t topograd_size(int64_t which) {
    const int64_t sizes[] = {sizeof(Matrix), sizeof(Norm), sizeof(Layer), sizeof(Row), sizeof(Run), sizeof(Readout)};
    return sizes[which];
}
}
