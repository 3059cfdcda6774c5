// Steps of the recurrent mixers (`nn/mamba/mamba2.py`, `mamba3.py`) on the rows of their projection.
// Included once per instruction set.
//
//     Mamba-2    conv of 4 taps, S ← e^{a} S + Δ x Bᵀ, y = S C + D x; then norm(y ∘ SiLU(z))
//     Mamba-3    S ← e^{a} (S + (1-λ) Δ x' B'ᵀ), y = S C + (D + λ Δ (C̃ · B̃)) x, S ← S + λ Δ x Bᵀ; then y ∘ SiLU(z)
//
// Rows of one sequence are in order, each a step. A sequence's first row reads the state `before`, which stays as
// it is (a snapshot), and all of them write the one `after`. A state is S (heads, p, n), then what follows below.

inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }
inline float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

// x ∘ SiLU(z) of n numbers.
inline void gate(const float *x, const float *z, int64_t n, float *to) {
    for (int64_t i = 0; i < n; i++) to[i] = x[i] * (z[i] * sigmoid(z[i]));
}

struct Mixed {
    const Layer &l;
    int64_t rows, stride;   // of the projection
    const Row *row;
    float *projected;       // (rows, stride): z, then the parts of each kind
    const float *const *before;
    float *const *after;    // by sequence
    float *y;               // (rows, heads · p)

    int64_t inner() const { return l.heads * l.head_width; }
    int64_t group(int64_t head) const { return head / (l.heads / l.groups); }
    int64_t heads_state() const { return inner() * l.state; }
    int64_t columns() const { return inner() + 2 * l.groups * l.state; }

    // A part of a sequence's state, with what it was before the sequence's first row.
    float *continued(int64_t r, int64_t first, int64_t count) const {
        float *to = after[row[r].sequence] + first;
        if (row[r].first) std::copy_n(before[row[r].sequence] + first, count, to);
        return to;
    }

    // SiLU(b + Σ w_k c_k) of some channels of x, B and C, in place. State: the last three (channels, 3).
    void convolve(Share mine) const {
        for (int64_t r = 0; r < rows; r++) {
            float *to = projected + r * stride + inner();
            float *last = continued(r, heads_state() + 3 * mine.first, 3 * (mine.last - mine.first));
            for (int64_t c = mine.first; c < mine.last; c++, last += 3) {
                const float *w = l.taps + 4 * c;
                float sum = ((last[0] * w[0] + last[1] * w[1]) + last[2] * w[2]) + to[c] * w[3];
                last[0] = last[1], last[1] = last[2], last[2] = to[c];
                sum += l.taps_bias[c];
                to[c] = sum * sigmoid(sum);
            }
        }
    }

    void steps(Share heads, std::vector<float> &scratch) const {
        scratch.resize(4 * l.state);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t head = heads.first; head < heads.last; head++)
                l.kind == MAMBA2 ? step2(r, head) : step3(r, head, scratch.data());
    }

    void step2(int64_t r, int64_t head) const {
        int64_t p = l.head_width, n = l.state;
        const float *x = projected + r * stride + inner() + head * p;
        const float *B = projected + r * stride + 2 * inner() + group(head) * n, *C = B + l.groups * n;
        float dt = softplus(projected[r * stride + inner() + columns() + head] + l.dt_bias[head]);
        float decay = std::exp(l.rate[head] * dt), *S = continued(r, head * p * n, p * n);
        for (int64_t i = 0; i < p; i++, S += n) {
            float v = dt * x[i];
            for (int64_t k = 0; k < n; k++) S[k] = decay * S[k] + v * B[k];
            y[r * inner() + head * p + i] = dot(S, C, n) + l.skip[head] * x[i];
        }
    }

    // State behind S: θ (heads, angles), B (heads, n), x (heads, p) of the row before.
    void step3(int64_t r, int64_t head, float *scratch) const {
        int64_t p = l.head_width, n = l.state, parts = l.groups * n;
        const float *x = projected + r * stride + inner() + head * p;
        const float *in = projected + r * stride + 2 * inner(), *each = in + 2 * parts + head;
        float dt = softplus(each[0] + l.dt_bias[head]), late = sigmoid(-each[2 * l.heads]) * dt, now = dt - late;
        float s = each[l.heads], decay = std::exp(-std::max(s >= 0 ? 1 + s : 1 / (1 - s), 1e-4f) * dt);
        float *B = scratch, *C = B + n, *turned = C + n;
        biased(in + group(head) * n, l.B_norm, l.B_bias + head * n, B);
        biased(in + parts + group(head) * n, l.C_norm, l.C_bias + head * n, C);
        float own = dot(B, C, n);
        int64_t angles = heads_state(), keys = angles + l.heads * l.angles, inputs = keys + l.heads * n;
        float *theta = continued(r, angles + head * l.angles, l.angles), *old_B = continued(r, keys + head * n, n);
        float *old_x = continued(r, inputs + head * p, p), *S = continued(r, head * p * n, p * n);
        turn_angles(in + 2 * parts + 3 * l.heads, dt, theta);
        turn_pairs(B, theta, turned), std::copy_n(turned, n, B);
        turn_pairs(C, theta, turned);
        for (int64_t i = 0; i < p; i++, S += n) {
            float before = late * old_x[i], v = now * x[i];
            for (int64_t k = 0; k < n; k++) S[k] = decay * (S[k] + before * old_B[k]);
            y[r * inner() + head * p + i] = dot(S, turned, n) + (l.skip[head] + now * own) * x[i];
            for (int64_t k = 0; k < n; k++) S[k] += v * B[k];
            old_x[i] = x[i];
        }
        std::copy_n(B, n, old_B);
    }

    void biased(const float *from, const Norm &norm, const float *bias, float *to) const {
        normalize(norm, from, l.state, to);
        for (int64_t k = 0; k < l.state; k++) to[k] += bias[k];
    }

    // θ ← θ + π tanh(angle) Δ, within 2π.
    void turn_angles(const float *angle, float dt, float *theta) const {
        constexpr float PI = 3.14159265358979f;
        for (int64_t j = 0; j < l.angles; j++) {
            float sum = theta[j] + PI * std::tanh(angle[j]) * dt;
            theta[j] = sum - 2 * PI * std::floor(sum / (2 * PI));
        }
    }

    void turn_pairs(const float *x, const float *theta, float *to) const {
        for (int64_t j = 0; j < l.angles; j++) {
            float c = std::cos(theta[j]), s = std::sin(theta[j]), a = x[2 * j], b = x[2 * j + 1];
            to[2 * j] = a * c - b * s, to[2 * j + 1] = a * s + b * c;
        }
        std::copy(x + 2 * l.angles, x + l.state, to + 2 * l.angles);
    }

    // What the output projection reads.
    const float *gated(int64_t r, float *to) const {
        gate(y + r * inner(), projected + r * stride, inner(), to);
        int64_t n = inner() / l.groups;
        if (l.kind == MAMBA2)
            for (int64_t g = 0; g < l.groups; g++) {
                Norm norm = l.gated_norm;
                norm.gain += g * n;
                normalize(norm, to + g * n, n, to + g * n);
            }
        return to;
    }
};
