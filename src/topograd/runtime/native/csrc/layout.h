// What Python hands over: matrices, norms, layers and the new positions of a run (`library.py` has the same).
#pragma once

#include <cstdint>

constexpr int LANES = 8;   // outputs of a panel
constexpr int BLOCK = 32;  // inputs that share a scale
constexpr int ROWS = 64;   // rows that go through a stage at once; more go in parts

enum Format : int64_t { FLOAT32, BFLOAT16, INT8, INT4, INT4_MINIMA, GRID };
enum LayerKind : int64_t { ATTENTION, MAMBA2, MAMBA3 };
enum NormKind : int64_t { NO_NORM, RMS, LAYER };
enum Activation : int64_t { SILU, GELU, GELU_TANH, RELU, RELU2 };

// W (outputs, inputs) in panels of 8 outputs, and what is added.
struct Matrix {
    Format format;
    int64_t outputs, inputs;
    const uint8_t *data;
    const float *bias;
};

struct Norm {
    NormKind kind;
    const float *gain, *shift; // null: 1 and 0
    float epsilon;
};

struct Layer {
    LayerKind kind;
    Matrix qkv, output, hidden, down; // hidden: up, or panels of gate and up in turns
    Norm attention_norm, mlp_norm, attention_post, mlp_post, query_norm, key_norm;
    const float *positions; // learned (position_rows, width), or null
    const float *values;    // added to the values by token (vocabulary, kv heads * head width), or null
    int64_t position_rows, heads, kv_heads, head_width, window;
    int64_t rotation; // which table, or -1
    int64_t norm_behind_rotation, gated;
    Activation activation;
    float x0_scale, scale, softcap; // softcap 0: none
    // of a recurrent mixer (`mamba.h`), whose projections are qkv and output
    int64_t state, groups, angles;
    const float *taps, *taps_bias, *dt_bias, *rate, *skip, *B_bias, *C_bias;
    Norm gated_norm, B_norm, C_norm;
};

// A new position of a sequence: where its keys and values lie, and what it is.
struct Row {
    int64_t token, position, slot, room, buffer;
    int64_t sequence, first; // which of the run, and whether it is its first row
};

// Hidden states lie in buffers of (slots, room, width), or where `packed` in one of (rows, width).
struct Run {
    int64_t rows, width, layers, buffers, threads, packed, sequences;
    const Layer *layer;
    const Row *row;
    const float *const *h, *const *x0;  // (buffers): what the first layer reads
    float *const *keys, *const *values; // (layers, buffers) of (slots, kv heads, room, head width)
    const float *const *before;         // (layers, sequences): recurrent states, which stay as they are
    float *const *after;                // those behind the run
    const float *cosine[2], *sine[2];   // (positions, head width / 2)
    float *const *taps;                 // (layers, buffers): where h behind a layer goes, or null
};

// Logits: W norm(h) + b, capped.
struct Readout {
    int64_t rows, width, threads;
    const Matrix *matrix;
    const Norm *norm;
    const float *h;
    float *logits; // (rows, outputs)
    float softcap;
};
