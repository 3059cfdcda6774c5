// The layers of one stage or of a chain of them on new positions of any sequences, and the logits of a head.
// Included once per instruction set.
//
// All threads run `stage`, each on its own panels and heads, and meet between the steps of a layer:
//
//     blend x0 | q, k, v of its panels | store keys and values | attend | output onto h | MLP | down onto h |
//
// Norms and the layout for tiles are made by every thread for itself: they cost less than another meeting.
// Rows of one sequence are in order; a row sees the keys of those before it, which are stored one step earlier.

constexpr int GROUP = 4; // panels that are finished together; even, for gate and up

inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// Memory that all threads see.
struct Shared {
    std::vector<float> h, qkv, attended, hidden, branch;
};

// A thread's own memory.
struct Own {
    int thread, threads;
    Tiled tiled;
    std::vector<float> scores, query;
};

// Calls `finish(panel, row, y)` with y the 8 numbers of each of this thread's panels and rows, bias included;
// in units of `unit` panels, which are not split between threads: a unit's panels are 8 · rows floats apart.
template <class Finish>
void product(const Matrix &m, int64_t rows, const Own &own, int unit, Finish finish) {
    int64_t panels = padded(m.outputs) / LANES;
    Share mine = share(panels / unit, own.thread, own.threads);
    float y[GROUP * TILE * LANES];
    for (int64_t p = mine.first * unit; p < mine.last * unit; p += GROUP) {
        int group = int(std::min<int64_t>(GROUP, mine.last * unit - p));
        for (int64_t start = 0; start < rows; start += TILE) {
            int wide = int(std::min<int64_t>(TILE, rows - start));
            multiply(m, p, group, wide, own.tiled.chunk(start), y);
            for (int g = 0; g < group; g += unit)
                for (int r = 0; r < wide; r++) finish(p + g, start + r, y + (g * wide + r) * LANES, wide * LANES);
        }
    }
}

inline __m256 with_bias(const Matrix &m, int64_t panel, const float *y) {
    __m256 v = _mm256_loadu_ps(y);
    return m.bias ? _mm256_add_ps(v, _mm256_loadu_ps(m.bias + panel * LANES)) : v;
}

// Writes W x + b to rows that have room for whole panels.
inline void product_to(const Matrix &m, int64_t rows, const Own &own, float *to) {
    int64_t stride = padded(m.outputs);
    product(m, rows, own, 1, [&](int64_t panel, int64_t r, const float *y, int) {
        _mm256_storeu_ps(to + r * stride + panel * LANES, with_bias(m, panel, y));
    });
}

// to ← to + W x + b, for rows of exactly `outputs` numbers.
inline void product_onto(const Matrix &m, int64_t rows, const Own &own, float *to) {
    product(m, rows, own, 1, [&](int64_t panel, int64_t r, const float *y, int) {
        float v[LANES];
        _mm256_storeu_ps(v, with_bias(m, panel, y));
        float *h = to + r * m.outputs + panel * LANES;
        int64_t count = std::min<int64_t>(LANES, m.outputs - panel * LANES);
        for (int64_t i = 0; i < count; i++) h[i] += v[i];
    });
}

class StageRun {
  public:
    StageRun(const Run &run, int64_t start) : run(run), start(start), rows(std::min<int64_t>(ROWS, run.rows - start)) {
        int64_t qkv = 0, attended = 0, hidden = 0;
        for (int64_t i = 0; i < run.layers; i++) {
            const Layer &l = run.layer[i];
            qkv = std::max(qkv, padded(l.qkv.outputs));
            attended = std::max(attended, l.heads * l.head_width);
            hidden = std::max(hidden, padded(l.down.inputs));
        }
        shared.qkv.resize(rows * qkv), shared.attended.resize(rows * attended);
        shared.hidden.resize(rows * hidden), shared.branch.resize(rows * padded(run.width));
        shared.h.resize(rows * run.width);
        for (int64_t r = 0; r < rows; r++) std::copy_n(state(run.h, r), run.width, h() + r * run.width);
    }

    void work(int thread, int threads) {
        Own own{thread, threads, {}, {}, {}};
        for (int64_t i = 0; i < run.layers; i++) layer(i, own);
    }

  private:
    float *h() { return shared.h.data(); }
    template <class Float> Float *state(Float *const *buffers, int64_t r) const {
        const Row &at = row(r);
        return run.packed ? buffers[0] + (start + r) * run.width
                          : buffers[at.buffer] + (at.slot * at.room + at.position) * run.width;
    }
    const Row &row(int64_t r) const { return run.row[start + r]; }
    static void meet() { team::current()->meet(); }

    void layer(int64_t index, Own &own) {
        const Layer &l = run.layer[index];
        if (l.positions || l.x0_scale != 0) enter(l, own), meet();
        l.kind == ATTENTION ? block(index, own) : mixer(index, own);
        if (run.taps[index * run.buffers]) tap(run.taps + index * run.buffers, own);
    }

    void mixer(int64_t index, Own &own) {
        const Layer &l = run.layer[index];
        layout_normed(l.attention_norm, l.qkv, own);
        product_to(l.qkv, rows, own, shared.qkv.data()), meet();
        Mixed mixed{l, rows, padded(l.qkv.outputs), run.row + start, shared.qkv.data(),
                    run.before + index * run.sequences, run.after + index * run.sequences, shared.attended.data()};
        if (l.kind == MAMBA2) mixed.convolve(share(mixed.columns(), own.thread, own.threads)), meet();
        mixed.steps(share(l.heads, own.thread, own.threads), own.query), meet();
        own.tiled.fill(l.output.format, l.output.inputs, rows, [&](int64_t r, float *to) { return mixed.gated(r, to); });
        add(l.output, l.attention_post, own);
    }

    void block(int64_t index, Own &own) {
        const Layer &l = run.layer[index];
        layout_normed(l.attention_norm, l.qkv, own);
        product_to(l.qkv, rows, own, shared.qkv.data()), meet();
        store(index, own), meet();
        attend(index, own), meet();
        layout(l.output, shared.attended.data(), l.output.inputs, own);
        add(l.output, l.attention_post, own);
        layout_normed(l.mlp_norm, l.hidden, own);
        mlp(l, own), meet();
        layout(l.down, shared.hidden.data(), padded(l.down.inputs), own);
        add(l.down, l.mlp_post, own);
    }

    // h ← h + positions + s x0.
    void enter(const Layer &l, const Own &own) {
        Share mine = share(rows, own.thread, own.threads);
        for (int64_t r = mine.first; r < mine.last; r++) {
            float *to = h() + r * run.width;
            if (l.positions) {
                const float *p = l.positions + std::min(row(r).position, l.position_rows - 1) * run.width;
                for (int64_t i = 0; i < run.width; i++) to[i] += p[i];
            }
            const float *x0 = state(run.x0, r);
            if (l.x0_scale != 0)
                for (int64_t i = 0; i < run.width; i++) to[i] += l.x0_scale * x0[i];
        }
    }

    void layout(const Matrix &m, const float *x, int64_t stride, Own &own) {
        own.tiled.fill(m.format, m.inputs, rows, [&](int64_t r, float *) { return x + r * stride; });
    }

    void layout_normed(const Norm &norm, const Matrix &m, Own &own) {
        own.tiled.fill(m.format, m.inputs, rows, [&](int64_t r, float *to) {
            normalize(norm, h() + r * run.width, run.width, to);
            return (const float *)to;
        });
    }

    // h ← h + W x, or h + norm(W x).
    void add(const Matrix &m, const Norm &post, Own &own) {
        if (post.kind == NO_NORM) {
            product_onto(m, rows, own, h()), meet();
            return;
        }
        product_to(m, rows, own, shared.branch.data()), meet();
        Share mine = share(rows, own.thread, own.threads);
        for (int64_t r = mine.first; r < mine.last; r++) {
            float *y = shared.branch.data() + r * padded(m.outputs), *to = h() + r * run.width;
            normalize(post, y, run.width, y);
            for (int64_t i = 0; i < run.width; i++) to[i] += y[i];
        }
        meet();
    }

    void mlp(const Layer &l, const Own &own) {
        int64_t stride = padded(l.down.inputs);
        product(l.hidden, rows, own, l.gated ? 2 : 1, [&](int64_t panel, int64_t r, const float *y, int next) {
            __m256 v = activate(with_bias(l.hidden, panel, y), l.activation);
            if (l.gated) v = _mm256_mul_ps(v, with_bias(l.hidden, panel + 1, y + next));
            int64_t place = l.gated ? panel / 2 : panel;
            _mm256_storeu_ps(shared.hidden.data() + r * stride + place * LANES, v);
        });
    }

    // A head of queries or keys as attention reads it.
    void turn(const Layer &l, const Norm &norm, int64_t position, float *x) const {
        bool normed = norm.kind != NO_NORM;
        if (normed && !l.norm_behind_rotation) normalize(norm, x, l.head_width, x);
        if (l.rotation >= 0) {
            int64_t half = l.head_width / 2;
            rotate(x, run.cosine[l.rotation] + position * half, run.sine[l.rotation] + position * half, half);
        }
        if (normed && l.norm_behind_rotation) normalize(norm, x, l.head_width, x);
    }

    float *cached(float *const *buffers, int64_t index, const Row &to, const Layer &l, int64_t head) const {
        float *buffer = buffers[index * run.buffers + to.buffer];
        return buffer + (to.slot * l.kv_heads + head) * to.room * l.head_width;
    }

    // Keys and values of the new rows go to their slots.
    void store(int64_t index, const Own &own) {
        const Layer &l = run.layer[index];
        int64_t d = l.head_width, stride = padded(l.qkv.outputs);
        Share mine = share(rows * l.kv_heads, own.thread, own.threads);
        for (int64_t unit = mine.first; unit < mine.last; unit++) {
            int64_t r = unit / l.kv_heads, head = unit % l.kv_heads;
            const Row &at = row(r);
            const float *k = shared.qkv.data() + r * stride + (l.heads + head) * d, *v = k + l.kv_heads * d;
            float *key = cached(run.keys, index, at, l, head) + at.position * d;
            float *value = cached(run.values, index, at, l, head) + at.position * d;
            std::copy(k, k + d, key);
            turn(l, l.key_norm, at.position, key);
            std::copy(v, v + d, value);
            if (!l.values) continue;
            const float *extra = l.values + (at.token * l.kv_heads + head) * d;
            for (int64_t i = 0; i < d; i++) value[i] += extra[i];
        }
    }

    void attend(int64_t index, Own &own) {
        const Layer &l = run.layer[index];
        int64_t d = l.head_width, stride = padded(l.qkv.outputs);
        Share mine = share(rows * l.heads, own.thread, own.threads);
        for (int64_t unit = mine.first; unit < mine.last; unit++) {
            int64_t r = unit / l.heads, head = unit % l.heads, kv = head / (l.heads / l.kv_heads);
            const Row &at = row(r);
            int64_t first = l.window ? std::max<int64_t>(0, at.position - l.window + 1) : 0;
            int64_t count = at.position - first + 1;
            const float *q = shared.qkv.data() + r * stride + head * d;
            own.query.assign(q, q + d);
            turn(l, l.query_norm, at.position, own.query.data());
            own.scores.resize(padded(count));
            float total = weigh(l, own, cached(run.keys, index, at, l, kv) + first * d, count);
            const float *values = cached(run.values, index, at, l, kv) + first * d;
            blend(own.scores.data(), count, values, d, 1 / total, shared.attended.data() + r * l.heads * d + head * d);
        }
    }

    // exp(score - largest) of each position; returns their sum.
    static float weigh(const Layer &l, Own &own, const float *keys, int64_t count) {
        float *s = own.scores.data();
        const float *q = own.query.data();
        int64_t d = l.head_width;
        for (int64_t i = 0; i < count; i += LANES)
            _mm256_storeu_ps(s + i, _mm256_mul_ps(dots(q, keys + i * d, count - i, d), _mm256_set1_ps(l.scale)));
        std::fill(s + count, s + padded(count), -INFINITY);
        __m256 most = _mm256_set1_ps(-INFINITY);
        for (int64_t i = 0; i < count; i += LANES) {
            __m256 v = _mm256_loadu_ps(s + i);
            if (l.softcap > 0) {
                __m256 missing = _mm256_cmp_ps(v, _mm256_set1_ps(-INFINITY), _CMP_EQ_OQ);
                v = _mm256_blendv_ps(capped(v, l.softcap), v, missing);
                _mm256_storeu_ps(s + i, v);
            }
            most = _mm256_max_ps(most, v);
        }
        float lane[LANES];
        _mm256_storeu_ps(lane, most);
        __m256 largest = _mm256_set1_ps(*std::max_element(lane, lane + LANES)), sum = _mm256_setzero_ps();
        for (int64_t i = 0; i < count; i += LANES) {
            __m256 e = exponential(_mm256_sub_ps(_mm256_loadu_ps(s + i), largest));
            _mm256_storeu_ps(s + i, e);
            sum = _mm256_add_ps(sum, e);
        }
        return lanes_sum(sum);
    }

    // Σ weight · value, times `factor`.
    static void blend(const float *weight, int64_t count, const float *values, int64_t d, float factor, float *to) {
        int64_t at = 0;
        for (; at + 64 <= d; at += 64) blend_part<8>(weight, count, values + at, d, factor, to + at);
        for (; at + 32 <= d; at += 32) blend_part<4>(weight, count, values + at, d, factor, to + at);
        for (; at + LANES <= d; at += LANES) blend_part<1>(weight, count, values + at, d, factor, to + at);
        for (; at < d; at++) {
            float sum = 0;
            for (int64_t i = 0; i < count; i++) sum += weight[i] * values[i * d + at];
            to[at] = sum * factor;
        }
    }

    template <int V>
    static void blend_part(const float *weight, int64_t count, const float *values, int64_t d, float factor, float *to) {
        __m256 acc[V];
        for (int v = 0; v < V; v++) acc[v] = _mm256_setzero_ps();
        for (int64_t i = 0; i < count; i++, values += d) {
            __m256 w = _mm256_broadcast_ss(weight + i);
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) acc[v] = _mm256_fmadd_ps(w, _mm256_loadu_ps(values + v * LANES), acc[v]);
        }
        for (int v = 0; v < V; v++) _mm256_storeu_ps(to + v * LANES, _mm256_mul_ps(acc[v], _mm256_set1_ps(factor)));
    }

    // The rows that `enter` changes next in the same thread, so nobody has to wait.
    void tap(float *const *buffers, const Own &own) {
        Share mine = share(rows, own.thread, own.threads);
        for (int64_t r = mine.first; r < mine.last; r++)
            std::copy_n(h() + r * run.width, run.width, state(buffers, r));
    }

    const Run &run;
    int64_t start, rows;
    Shared shared;
};

inline void stage(const Run &run) {
    for (int64_t start = 0; start < run.rows; start += ROWS) {
        StageRun part(run, start);
        auto work = [](void *job, int thread, int threads) { ((StageRun *)job)->work(thread, threads); };
        team::current()->run(work, &part, int(run.threads));
    }
}

inline void read_rows(const Readout &out, int64_t start, Own &own) {
    const Matrix &m = *out.matrix;
    int64_t rows = std::min<int64_t>(ROWS, out.rows - start);
    own.tiled.fill(m.format, m.inputs, rows, [&](int64_t r, float *to) {
        normalize(*out.norm, out.h + (start + r) * out.width, out.width, to);
        return (const float *)to;
    });
    product(m, rows, own, 1, [&](int64_t panel, int64_t r, const float *y, int) {
        float v[LANES];
        __m256 z = with_bias(m, panel, y);
        _mm256_storeu_ps(v, out.softcap > 0 ? capped(z, out.softcap) : z);
        int64_t first = panel * LANES;
        std::copy(v, v + std::min<int64_t>(LANES, m.outputs - first), out.logits + (start + r) * m.outputs + first);
    });
}

// The plain read that a share of bandwidth is a share of: nothing but loads, by all threads.
inline void read_plainly(const uint8_t *from, int64_t bytes, int threads) {
    struct Job {
        const uint8_t *from;
        int64_t blocks;
        std::atomic<int64_t> found;
    } job{from, bytes / 256, {0}};
    auto work = [](void *job, int thread, int threads) {
        Job &all = *(Job *)job;
        Share mine = share(all.blocks, thread, threads);
        __m256i sum[4] = {};
        for (int64_t i = mine.first; i < mine.last; i++) {
            const __m256i *p = (const __m256i *)(all.from + 256 * i);
            for (int k = 0; k < 8; k++) sum[k % 4] = _mm256_xor_si256(sum[k % 4], _mm256_loadu_si256(p + k));
        }
        __m256i one = _mm256_xor_si256(_mm256_xor_si256(sum[0], sum[1]), _mm256_xor_si256(sum[2], sum[3]));
        all.found += _mm256_extract_epi64(one, 0) ^ _mm256_extract_epi64(one, 1) ^ _mm256_extract_epi64(one, 2) ^ _mm256_extract_epi64(one, 3);
    };
    team::current()->run(work, &job, threads);
}

inline void readout(const Readout &out) {
    auto work = [](void *job, int thread, int threads) {
        Own own{thread, threads, {}, {}, {}};
        const Readout &out = *(const Readout *)job;
        for (int64_t start = 0; start < out.rows; start += ROWS) read_rows(out, start, own);
    };
    team::current()->run(work, (void *)&out, int(out.threads));
}
