#include "knapspec-attention.h"

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"
#include "knapspec-attention-simd.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <initializer_list>

#ifdef KNAPSPEC_LANES

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized" // about its own intrinsics
#endif

namespace {

constexpr int TILE       = 64;  // keys that are read, weighed and summed together
constexpr int BLOCK_ROWS = 6;   // query rows of a register block
constexpr int FEW_TOKENS = 16;  // up to here threads share the keys of a row, beyond each takes rows of its own
constexpr int STRIP_ROWS = 96;  // query rows that a thread takes at a time then
// So little work that two barriers would cost more than they save: tiles, and tiles times rows (and what reading a tile
// costs in rows) times widths.
constexpr int ALONE_TILES = 16, TILE_ROWS = 8, ALONE_WORK = 256*128;
constexpr int MAX_WIDTH  = 576; // of a head; bounds the scratch of a thread
constexpr ggml_fp16_t MASKED = 0xFC00; // -inf
constexpr int ALIGNMENT  = 64;  // bytes; threads share no cache line that one of them writes

// What a token's mask does to a tile.
enum TileState : uint8_t { OPEN, PARTIAL, HIDDEN };

constexpr size_t align(size_t n) {
    return (n + ALIGNMENT - 1)/ALIGNMENT*ALIGNMENT;
}

// Chunks are a whole number of tiles and lie at fixed cells: short ones first, so that short contexts occupy all threads,
// then 256 keys, and a sixteenth of the power of two below them from cell 8192 on, so that partial sums stay few.
int chunk_end(int cell) {
    if (cell < 128) {
        return cell + 64;
    }
    if (cell < 256) {
        return 256;
    }
    int size = 256;
    while (cell >= 32*size) {
        size *= 2;
    }
    return cell + size;
}

// The first cell of a chunk.
int chunk_begin(int chunk) {
    int cell = 0;
    for (int i = 0; i < chunk; i++) {
        cell = chunk_end(cell);
    }
    return cell;
}

struct Tile {
    int stream, chunk, index;
};

struct Shape {
    int n_tokens, n_heads, n_heads_kv, n_streams, width_k, width_v;
    int n_keys, n_tiles, n_chunks;

    // query heads that share one head of keys, query rows of that head
    int group, rows;

    // tokens that are computed together: all of them, or the most that a thread takes
    int strip;

    explicit Shape(const ggml_tensor * op) {
        const ggml_tensor * q = op->src[0];
        const ggml_tensor * k = op->src[1];
        const ggml_tensor * v = op->src[2];
        n_tokens   = q->ne[1];
        n_heads    = q->ne[2];
        n_streams  = q->ne[3];
        n_heads_kv = k->ne[2];
        width_k    = k->ne[0];
        width_v    = v->ne[0];
        n_keys     = k->ne[1];
        group      = n_heads/n_heads_kv;
        rows       = group*n_tokens;
        strip      = is_few() ? n_tokens : std::min(n_tokens, (STRIP_ROWS + group - 1)/group);
        n_tiles    = (n_keys + TILE - 1)/TILE;
        n_chunks   = 0;
        for (int cell = 0; cell < n_keys; cell = chunk_end(cell)) {
            n_chunks++;
        }
    }

    bool is_few() const { return n_tokens <= FEW_TOKENS; }
    bool may_be_alone() const { return is_few() && n_streams*n_tiles <= ALONE_TILES; }
};

// Query rows of one head of keys, one token after the other, and what is known of them so far.
struct Rows {
    int stream, head_kv, token, n_tokens;
    const float * queries; // [row][width_k] scaled
    float * sums;          // [row][width_v] weighted sums of values
    float * maxima;        // [row] largest logit
    float * weights;       // [row] sum of the weights
};

// The work buffer, in bytes from its first aligned address.
struct Layout {
    size_t states; // [stream][tile][token] TileState

    // of few tokens: see Rows
    size_t queries;                // [stream][head_kv][row]
    size_t sums, maxima, weights;  // [stream][chunk][head_kv][row]

    // one per thread
    size_t threads, per_thread;
    size_t slopes;      // [head] what ALiBi multiplies the mask with
    size_t own_states;  // as states
    size_t keys, keys_f32, values_f32, tail_k, tail_v, tail_mask, logits, live, items, tiles;
    size_t strip_queries, chunk_sums, chunk_maxima, chunk_weights, strip_sums, strip_maxima, strip_weights;

    size_t total;
    size_t padded_rows; // so that threads write to lines of their own

    Layout(const Shape & s, const ggml_tensor * op, int n_threads) {
        size_t at = 0;
        const auto take = [&at](size_t bytes) { const size_t here = at; at += align(bytes); return here; };
        const auto floats = [&take](size_t n) { return take(n*sizeof(float)); };
        padded_rows = align(s.rows*sizeof(float))/sizeof(float);
        const size_t few = s.is_few(), n_rows = (size_t) s.n_streams*s.n_heads_kv*s.rows;
        const size_t n_parts = few*s.n_streams*s.n_chunks*s.n_heads_kv;
        states  = take((size_t) s.n_streams*s.n_tiles*s.n_tokens);
        queries = floats(few*n_rows*s.width_k);
        sums    = floats(n_parts*s.rows*s.width_v);
        maxima  = floats(n_parts*padded_rows);
        weights = floats(n_parts*padded_rows);
        threads = at;
        at = 0;
        slopes     = floats(s.n_heads);
        own_states = take(s.may_be_alone() ? (size_t) s.n_streams*s.n_tiles*s.n_tokens : 0);
        keys       = take(sizeof(ggml_fp16_t)*s.width_k*TILE);
        keys_f32   = floats((size_t) s.width_k*TILE);
        values_f32 = floats((size_t) s.width_v*TILE);
        tail_k     = take(ggml_row_size(op->src[1]->type, s.width_k)*TILE);
        tail_v     = take(ggml_row_size(op->src[2]->type, s.width_v)*TILE);
        tail_mask  = take(sizeof(ggml_fp16_t)*TILE);
        logits     = floats(BLOCK_ROWS*TILE);
        live       = take(sizeof(int)*s.n_streams*s.n_chunks);
        items      = take(sizeof(int)*(s.n_streams*s.n_chunks + 1));
        tiles      = take(sizeof(Tile)*s.n_streams*s.n_tiles);
        const size_t strip = few && !s.may_be_alone() ? 0 : (size_t) s.strip*s.group;
        strip_queries = floats(strip*s.width_k);
        strip_sums    = floats(strip*s.width_v);
        strip_maxima  = floats(strip);
        strip_weights = floats(strip);
        chunk_sums    = floats(strip*s.width_v);
        chunk_maxima  = floats(strip);
        chunk_weights = floats(strip);
        per_thread = at;
        total      = threads + per_thread*n_threads + ALIGNMENT;
    }
};

template <typename T> T * at(char * base, size_t offset) {
    return reinterpret_cast<T *>(base + offset);
}

// Rows of the keys and values that come next, fetched evenly while this tile is computed: a core has few requests under way
// at a time, and fetching them in a burst would stop the multiplications.
struct Prefetch {
    struct Rows {
        const char * at = nullptr;
        size_t stride = 0;
        int bytes = 0; // of a row
    };

    Rows rows, after;
    int left = 0;
    int rate = 0, due = 0; // rows per tick, in 256ths

    Prefetch() = default;
    Prefetch(const Rows & keys, const Rows & values, int ticks)
        : rows(keys), after(values), left(TILE), rate(256*2*TILE/ticks + 1) {}

    KNAPSPEC_INLINE void tick(int n) {
        due += n*rate;
        while (due >= 256) {
            due -= 256;
            for (int i = 0; i < rows.bytes; i += 64) {
                KNAPSPEC_PREFETCH(rows.at + i);
            }
            rows.at += rows.stride;
            if (--left == 0) {
                rows  = after;
                after = Rows();
                left  = TILE;
            }
        }
    }
};

// ticks of a step, about in proportion to its time
constexpr int TURN_TICKS = 4, ROW_TICKS = 12;
// steps of the inner loops between two looks whether something is due
constexpr int STRIDE = 4;

// Keys turned, out[d][key], so that a vector holds one d of neighbouring keys and a logit is summed over d in order.
void turn_keys_f16(const char * k, size_t stride, int width, ggml_fp16_t * out, Prefetch & ahead) {
    constexpr int step = 2*KNAPSPEC_LANES;
    for (int key = 0; key < TILE; key += step) {
        for (int d = 0; d < width; d += 8) {
            ahead.tick(TURN_TICKS);
            v_turn_f16(k + key*stride + d*sizeof(ggml_fp16_t), stride, out + d*TILE + key, TILE);
        }
    }
}

void convert(const ggml_fp16_t * from, float * to, int n) {
    for (int i = 0; i < n; i += KNAPSPEC_LANES) {
        v_store(to + i, v_load(from + i));
    }
}

void turn_keys_q8_0(const char * k, size_t stride, int width, float * out) {
    for (int key = 0; key < TILE; key += KNAPSPEC_LANES) {
        const char * first = k + key*stride;
        for (int d = 0; d < width; d += QK8_0) {
            const char * block = first + d/QK8_0*sizeof(block_q8_0);
            ggml_fp16_t factors[KNAPSPEC_LANES];
            for (int i = 0; i < KNAPSPEC_LANES; i++) {
                factors[i] = ((const block_q8_0 *) (block + i*stride))->d;
            }
            const vf factor = v_load(factors);
            for (int half = 0; half < QK8_0; half += 16) {
                v_turn_i8(block + offsetof(block_q8_0, qs) + half, stride, factor, out + (d + half)*TILE + key, TILE);
            }
        }
    }
}

void values_from_q8_0(const char * v, size_t stride, int width, float * out) {
    for (int key = 0; key < TILE; key++) {
        const block_q8_0 * blocks = (const block_q8_0 *) (v + key*stride);
        for (int d = 0; d < width; d += QK8_0) {
            const vf factor = v_set(GGML_CPU_FP16_TO_FP32(blocks[d/QK8_0].d));
            KNAPSPEC_UNROLL
            for (int i = 0; i < QK8_0; i += KNAPSPEC_LANES) {
                v_store(out + key*width + d + i, v_mul(factor, v_load(blocks[d/QK8_0].qs + i)));
            }
        }
    }
}

// logits[row][key] = query[row] · key, over d in order
template <int R, typename K>
void weigh(const float * q, int width, const K * keys, float * logits, Prefetch & prefetch) {
    Prefetch ahead = prefetch; // in registers
    constexpr int C = KNAPSPEC_BLOCK;
    for (int key = 0; key < TILE; key += C*KNAPSPEC_LANES) {
        vf acc[R][C];
        KNAPSPEC_UNROLL
        for (int r = 0; r < R; r++) {
            KNAPSPEC_UNROLL
            for (int c = 0; c < C; c++) {
                acc[r][c] = v_zero();
            }
        }
        for (int d0 = 0; d0 < width; d0 += STRIDE) {
            ahead.tick(STRIDE);
            KNAPSPEC_UNROLL
            for (int d = d0; d < d0 + STRIDE; d++) {
                vf k[C];
                KNAPSPEC_UNROLL
                for (int c = 0; c < C; c++) {
                    k[c] = v_load(keys + d*TILE + key + c*KNAPSPEC_LANES);
                }
                KNAPSPEC_UNROLL
                for (int r = 0; r < R; r++) {
                    const vf x = v_set(q[r*width + d]);
                    KNAPSPEC_UNROLL
                    for (int c = 0; c < C; c++) {
                        acc[r][c] = v_fma(x, k[c], acc[r][c]);
                    }
                }
            }
        }
        KNAPSPEC_UNROLL
        for (int r = 0; r < R; r++) {
            KNAPSPEC_UNROLL
            for (int c = 0; c < C; c++) {
                v_store(logits + r*TILE + key + c*KNAPSPEC_LANES, acc[r][c]);
            }
        }
    }
    prefetch = ahead;
}

// C vectors of columns: sums[row] += weight[row][key]*value[key], over the keys in order
template <int R, int C, typename V>
KNAPSPEC_INLINE void add_columns(const float * weights, const char * v, size_t stride, float * sums, int width,
                                 Prefetch & prefetch) {
    Prefetch ahead = prefetch;
    vf acc[R][C];
    KNAPSPEC_UNROLL
    for (int r = 0; r < R; r++) {
        KNAPSPEC_UNROLL
        for (int c = 0; c < C; c++) {
            acc[r][c] = v_load(sums + r*width + c*KNAPSPEC_LANES);
        }
    }
    for (int key0 = 0; key0 < TILE; key0 += STRIDE) {
        ahead.tick(STRIDE);
        KNAPSPEC_UNROLL
        for (int key = key0; key < key0 + STRIDE; key++) {
            vf x[C];
            KNAPSPEC_UNROLL
            for (int c = 0; c < C; c++) {
                x[c] = v_load((const V *) (v + key*stride) + c*KNAPSPEC_LANES);
            }
            KNAPSPEC_UNROLL
            for (int r = 0; r < R; r++) {
                const vf p = v_set(weights[r*TILE + key]);
                KNAPSPEC_UNROLL
                for (int c = 0; c < C; c++) {
                    acc[r][c] = v_fma(p, x[c], acc[r][c]);
                }
            }
        }
    }
    KNAPSPEC_UNROLL
    for (int r = 0; r < R; r++) {
        KNAPSPEC_UNROLL
        for (int c = 0; c < C; c++) {
            v_store(sums + r*width + c*KNAPSPEC_LANES, acc[r][c]);
        }
    }
    prefetch = ahead;
}

template <int R, typename V>
void add_values(const float * weights, const char * v, size_t stride, float * sums, int width, Prefetch & ahead) {
    constexpr int step = KNAPSPEC_BLOCK*KNAPSPEC_LANES;
    int d = 0;
    for (; d + step <= width; d += step) {
        add_columns<R, KNAPSPEC_BLOCK, V>(weights, v + d*sizeof(V), stride, sums + d, width, ahead);
    }
    for (; d < width; d += KNAPSPEC_LANES) {
        add_columns<R, 1, V>(weights, v + d*sizeof(V), stride, sums + d, width, ahead);
    }
}

// The same sums without the keys that the mask hides: 0 times a value that is not a number is none either.
template <typename V>
void add_seen_values(const float * weights, const ggml_fp16_t * mask, const char * v, size_t stride, float * sums, int width) {
    for (int d = 0; d < width; d += KNAPSPEC_LANES) {
        vf acc = v_load(sums + d);
        for (int key = 0; key < TILE; key++) {
            if (mask[key] != MASKED) {
                acc = v_fma(v_set(weights[key]), v_load((const V *) (v + key*stride) + d), acc);
            }
        }
        v_store(sums + d, acc);
    }
}

template <typename V>
bool are_finite(const char * v, size_t stride, int width) {
    constexpr V exponent = sizeof(V) == 2 ? (V) 0x7C00 : (V) 0x7F800000;
    int bad = 0;
    for (int key = 0; key < TILE; key++) {
        const V * x = (const V *) (v + key*stride);
        for (int d = 0; d < width; d++) {
            bad |= (x[d] & exponent) == exponent;
        }
    }
    return !bad;
}

#define KNAPSPEC_ROWS(n, call) \
    switch (n) { \
        case 1:  { constexpr int R = 1; call; } break; \
        case 2:  { constexpr int R = 2; call; } break; \
        case 3:  { constexpr int R = 3; call; } break; \
        case 4:  { constexpr int R = 4; call; } break; \
        case 5:  { constexpr int R = 5; call; } break; \
        default: { constexpr int R = 6; call; } break; \
    }

KNAPSPEC_INLINE vf v_tanh(vf x) {
    // near 0 the quotient loses digits, the series does not
    const vf a = v_abs(x);
    const vf e = ggml_v_expf(v_mul(a, v_set(-2.0f)));
    const vf far = v_copysign(v_div(v_sub(v_set(1.0f), e), v_add(v_set(1.0f), e)), x);
    const vf z = v_mul(x, x);
    vf p = v_set(62.0f/2835);
    p = v_fma(p, z, v_set(-17.0f/315));
    p = v_fma(p, z, v_set(2.0f/15));
    p = v_fma(p, z, v_set(-1.0f/3));
    const vf near = v_fma(v_mul(p, z), x, x);
    return v_select_less(a, v_set(0.25f), near, far);
}

struct Attention {
    const ggml_tensor * op, * q, * k, * v, * mask, * sinks;
    Shape shape;
    Layout layout;
    int ith, nth;
    ggml_threadpool * threadpool;
    char * base;
    char * mine;
    uint8_t * table; // of tile states
    float scale, max_bias, softcap;

    Attention(const ggml_compute_params * params, const ggml_tensor * op)
        : op(op), q(op->src[0]), k(op->src[1]), v(op->src[2]), mask(op->src[3]), sinks(op->src[4]),
          shape(op), layout(shape, op, params->nth), ith(params->ith), nth(params->nth), threadpool(params->threadpool) {
        GGML_ASSERT(params->wsize >= layout.total);
        base = (char *) align((size_t) params->wdata);
        mine = base + layout.threads + ith*layout.per_thread;
        table = at<uint8_t>(base, layout.states);
        memcpy(&scale,    op->op_params + 0, sizeof(float));
        memcpy(&max_bias, op->op_params + 1, sizeof(float));
        memcpy(&softcap,  op->op_params + 2, sizeof(float));
        if (softcap != 0.0f) {
            scale /= softcap;
        }
    }

    float slope(int head) const {
        if (max_bias <= 0.0f) {
            return 1.0f;
        }
        const int n = 1 << (int) floor(log2(shape.n_heads));
        const float m0 = powf(2.0f, -max_bias/n);
        const float m1 = powf(2.0f, -max_bias/2.0f/n);
        return head < n ? powf(m0, head + 1) : powf(m1, 2*(head - n) + 1);
    }

    const ggml_fp16_t * mask_row(int stream, int token) const {
        return (const ggml_fp16_t *) ((const char *) mask->data + token*mask->nb[1] + stream%mask->ne[3]*mask->nb[3]);
    }

    const uint8_t * states(int stream, int tile) const {
        return table + ((size_t) stream*shape.n_tiles + tile)*shape.n_tokens;
    }

    // Whether none of these tokens sees a key of the tile.
    bool is_hidden(int stream, int tile, int token, int n_tokens) const {
        const uint8_t * state = states(stream, tile) + token;
        return std::all_of(state, state + n_tokens, [](uint8_t s) { return s == HIDDEN; });
    }

    size_t part(int stream, int chunk, int head_kv) const {
        return ((size_t) stream*shape.n_chunks + chunk)*shape.n_heads_kv + head_kv;
    }
    Rows rows_of_part(int stream, int chunk, int head_kv) const {
        const size_t p = part(stream, chunk, head_kv), query = (size_t) stream*shape.n_heads_kv + head_kv;
        return { stream, head_kv, 0, shape.n_tokens,
                 at<float>(base, layout.queries) + query*shape.rows*shape.width_k,
                 at<float>(base, layout.sums)    + p*shape.rows*shape.width_v,
                 at<float>(base, layout.maxima)  + p*layout.padded_rows,
                 at<float>(base, layout.weights) + p*layout.padded_rows };
    }

    void clear(const Rows & r) const {
        const int n = r.n_tokens*shape.group;
        std::fill_n(r.maxima, n, -INFINITY);
        std::fill_n(r.weights, n, 0.0f);
        std::fill_n(r.sums, (size_t) n*shape.width_v, 0.0f);
    }

    // One row of queries, scaled.
    void take_query(int stream, int token, int head, float * to) const {
        const float * from = (const float *) ((const char *) q->data + token*q->nb[1] + head*q->nb[2] + stream*q->nb[3]);
        for (int d = 0; d < shape.width_k; d++) {
            to[d] = from[d]*scale;
        }
    }

    // This thread's share of what all of them read afterwards: masks looked through, queries gathered.
    void prepare() {
        const int64_t n_tiles = shape.n_streams*shape.n_tiles;
        look_through_masks(n_tiles*ith/nth, n_tiles*(ith + 1)/nth);
        const int n_rows = shape.is_few() ? shape.n_streams*shape.n_heads_kv*shape.rows : 0;
        for (int i = (int64_t) n_rows*ith/nth; i < (int64_t) n_rows*(ith + 1)/nth; i++) {
            const int row = i%shape.rows, head_kv = i/shape.rows%shape.n_heads_kv, stream = i/shape.rows/shape.n_heads_kv;
            take_query(stream, row/shape.group, head_kv*shape.group + row%shape.group,
                       at<float>(base, layout.queries) + (size_t) i*shape.width_k);
        }
    }

    // Tiles first..last - 1, counted over all streams.
    void look_through_masks(int first_tile, int last_tile) {
        for (int i = first_tile; i < last_tile; i++) {
            const int stream = i/shape.n_tiles, tile = i%shape.n_tiles;
            const int first = tile*TILE, n = std::min(TILE, shape.n_keys - first);
            uint8_t * state = table + (size_t) i*shape.n_tokens;
            for (int j = 0; j < shape.n_tokens; j++) {
                if (!mask) {
                    state[j] = n < TILE ? PARTIAL : OPEN;
                    continue;
                }
                const ggml_fp16_t * m = mask_row(stream, j) + first;
                uint16_t bits = 0, hidden = 0;
                for (int t = 0; t < n; t++) {
                    bits   |= m[t];
                    hidden += m[t] == MASKED;
                }
                state[j] = hidden == n ? HIDDEN : (bits & 0x7FFF) || n < TILE ? PARTIAL : OPEN;
            }
        }
    }

    // Tiles of each chunk that some token sees.
    void count_live(int * live) const {
        for (int stream = 0; stream < shape.n_streams; stream++) {
            for (int cell = 0; cell < shape.n_keys; cell = chunk_end(cell)) {
                const int end = std::min(chunk_end(cell), shape.n_keys);
                *live = 0;
                for (int tile = cell/TILE; tile*TILE < end; tile++) {
                    *live += !is_hidden(stream, tile, 0, shape.n_tokens);
                }
                live++;
            }
        }
    }

    // Ranges of chunks with at least that many live tiles; items[i + 1] is the first chunk behind range i. Returns how many.
    int divide(const int * live, int n_tiles, int * items) const {
        const int n_chunks = shape.n_streams*shape.n_chunks;
        int n_items = 0, filled = 0;
        items[0] = 0;
        for (int i = 0; i < n_chunks; i++) {
            filled += live[i];
            if (filled >= n_tiles || (i + 1 == n_chunks && filled > 0)) {
                items[++n_items] = i + 1;
                filled = 0;
            }
        }
        return n_items;
    }

    void compute() {
        for (int head = 0; head < shape.n_heads; head++) {
            at<float>(mine, layout.slopes)[head] = slope(head);
        }
        if (shape.may_be_alone() && compute_alone()) {
            return;
        }
        if (ith == 0) {
            ggml_threadpool_chunk_set(threadpool, nth);
        }
        prepare();
        ggml_barrier(threadpool);
        if (shape.is_few()) {
            compute_few();
        } else {
            compute_many();
        }
    }

    int next_item(int item) const {
        return ggml_is_numa() ? item + nth : ggml_threadpool_chunk_add(threadpool, 1);
    }

    // Little work: each thread finds out by itself which rows are its own, and no one waits. False: it is too much.
    bool compute_alone() {
        uint8_t * shared = table;
        table = at<uint8_t>(mine, layout.own_states);
        const int n_tiles = shape.n_streams*shape.n_tiles;
        look_through_masks(0, n_tiles);
        int n_live = 0;
        for (int i = 0; i < n_tiles; i++) {
            n_live += !is_hidden(i/shape.n_tiles, i%shape.n_tiles, 0, shape.n_tokens);
        }
        const int n_heads = shape.n_streams*shape.n_heads_kv;
        const int parts = std::min(shape.n_tokens, (2*nth + n_heads - 1)/n_heads), n_items = n_heads*parts;
        const int64_t work = (int64_t) n_live*(shape.rows + TILE_ROWS)*(shape.width_k + shape.width_v);
        if (work*nth > (int64_t) ALONE_WORK*std::min(nth, n_items)) {
            table = shared;
            return false;
        }
        for (int item = ith; item < n_items; item += nth) {
            const int head = item/parts, token = shape.n_tokens*(item%parts)/parts;
            compute_strip(head/shape.n_heads_kv, head%shape.n_heads_kv, token, shape.n_tokens*(item%parts + 1)/parts - token);
        }
        return true;
    }

    // Threads share the keys; each chunk has sums of its own, which are put together at the end.
    void compute_few() {
        int * live  = at<int>(mine, layout.live);
        int * items = at<int>(mine, layout.items);
        int n_live = 0, n_live_chunks = 0;
        count_live(live);
        for (int i = 0; i < shape.n_streams*shape.n_chunks; i++) {
            n_live += live[i];
            n_live_chunks += live[i] > 0;
        }
        // several items per thread, for cores of different speed; heads apart where chunks are too few
        const int wanted = 4*nth;
        const int parts = nth == 1 || n_live_chunks == 0 ? 1
            : std::min(shape.n_heads_kv, (wanted + n_live_chunks - 1)/n_live_chunks);
        const int n_items = parts*divide(live, std::max(1, n_live*parts/wanted), items);
        for (int item = ith; item < n_items; item = next_item(item)) {
            const int range = item/parts, share = item%parts;
            compute_chunks(items[range], items[range + 1], live, shape.n_heads_kv*share/parts, shape.n_heads_kv*(share + 1)/parts);
        }
        ggml_barrier(threadpool);

        const int n_rows = shape.n_streams*shape.n_heads*shape.n_tokens;
        for (int i = (int64_t) n_rows*ith/nth; i < (int64_t) n_rows*(ith + 1)/nth; i++) {
            const int row = i%shape.rows, head_kv = i/shape.rows%shape.n_heads_kv, stream = i/shape.rows/shape.n_heads_kv;
            const int token = row/shape.group, head = head_kv*shape.group + row%shape.group;
            float maximum = -INFINITY, weight = 0.0f;
            float * out = output(stream, token, head);
            std::fill_n(out, shape.width_v, 0.0f);
            for (int chunk = 0; chunk < shape.n_chunks; chunk++) {
                if (live[stream*shape.n_chunks + chunk]) {
                    const Rows r = rows_of_part(stream, chunk, head_kv);
                    fold(maximum, weight, out, r.maxima[row], r.weights[row], r.sums + (size_t) row*shape.width_v);
                }
            }
            finish(head, maximum, weight, out, out);
        }
    }

    // Chunks first..last - 1, counted over all streams, for some heads of keys: tile after tile, so that memory is read in
    // about its order.
    void compute_chunks(int first, int last, const int * live, int head0, int head1) {
        Tile * tiles = at<Tile>(mine, layout.tiles);
        int n_tiles = 0;
        for (int i = first; i < last; i++) {
            if (!live[i]) {
                continue;
            }
            const int stream = i/shape.n_chunks, chunk = i%shape.n_chunks;
            for (int head = head0; head < head1; head++) {
                clear(rows_of_part(stream, chunk, head));
            }
            n_tiles += find_tiles(stream, chunk, chunk_begin(chunk), 0, shape.n_tokens, tiles + n_tiles);
        }
        for (int i = 0; i < n_tiles; i++) {
            for (int head = head0; head < head1; head++) {
                const bool same = head + 1 < head1;
                const Tile * next = same ? &tiles[i] : i + 1 < n_tiles ? &tiles[i + 1] : nullptr;
                compute_tile(tiles[i], rows_of_part(tiles[i].stream, tiles[i].chunk, head), next, same ? head + 1 : head0);
            }
        }
    }

    // Each thread takes some tokens of one head of keys and goes through all chunks, in their order.
    void compute_many() {
        const int n_heads = shape.n_streams*shape.n_heads_kv;
        const int strip = std::min(shape.strip, std::max(8, (int) ((int64_t) shape.n_tokens*n_heads/(4*nth))));
        const int n_strips = (shape.n_tokens + strip - 1)/strip;
        for (int item = ith; item < n_strips*n_heads; item = next_item(item)) {
            // the last tokens see most, so they go first
            const int token = (n_strips - 1 - item/n_heads)*strip;
            compute_strip(item%n_heads/shape.n_heads_kv, item%shape.n_heads_kv, token, std::min(strip, shape.n_tokens - token));
        }
    }

    void compute_strip(int stream, int head_kv, int token, int n_tokens) {
        const int n_rows = n_tokens*shape.group;
        float * queries = at<float>(mine, layout.strip_queries);
        const Rows whole = { stream, head_kv, token, n_tokens, queries, at<float>(mine, layout.strip_sums),
                             at<float>(mine, layout.strip_maxima), at<float>(mine, layout.strip_weights) };
        const Rows part  = { stream, head_kv, token, n_tokens, queries, at<float>(mine, layout.chunk_sums),
                             at<float>(mine, layout.chunk_maxima), at<float>(mine, layout.chunk_weights) };
        for (int row = 0; row < n_rows; row++) {
            take_query(stream, token + row/shape.group, head_kv*shape.group + row%shape.group, queries + (size_t) row*shape.width_k);
        }
        Tile * tiles = at<Tile>(mine, layout.tiles);
        int n_tiles = 0;
        for (int chunk = 0, cell = 0; chunk < shape.n_chunks; chunk++, cell = chunk_end(cell)) {
            n_tiles += find_tiles(stream, chunk, cell, token, n_tokens, tiles + n_tiles);
        }
        clear(whole);
        for (int i = 0; i < n_tiles; i++) {
            if (i == 0 || tiles[i].chunk != tiles[i - 1].chunk) {
                clear(part);
            }
            const bool is_last = i + 1 == n_tiles;
            compute_tile(tiles[i], part, is_last ? nullptr : &tiles[i + 1], head_kv);
            if (is_last || tiles[i].chunk != tiles[i + 1].chunk) {
                for (int row = 0; row < n_rows; row++) {
                    fold(whole.maxima[row], whole.weights[row], whole.sums + (size_t) row*shape.width_v,
                         part.maxima[row], part.weights[row], part.sums + (size_t) row*shape.width_v);
                }
            }
        }
        for (int row = 0; row < n_rows; row++) {
            const int head = head_kv*shape.group + row%shape.group;
            finish(head, whole.maxima[row], whole.weights[row], whole.sums + (size_t) row*shape.width_v,
                   output(stream, token + row/shape.group, head));
        }
    }

    // The tiles of a chunk that some of these tokens see. Returns how many.
    int find_tiles(int stream, int chunk, int cell, int token, int n_tokens, Tile * tiles) const {
        const int end = std::min(chunk_end(cell), shape.n_keys);
        int n = 0;
        for (int tile = cell/TILE; tile*TILE < end; tile++) {
            if (!is_hidden(stream, tile, token, n_tokens)) {
                tiles[n++] = { stream, chunk, tile };
            }
        }
        return n;
    }

    float * output(int stream, int token, int head) const {
        return (float *) ((char *) op->data + token*op->nb[2] + head*op->nb[1] + stream*op->nb[3]);
    }

    // Adds what a chunk found to what those before it found.
    void fold(float & maximum, float & weight, float * sums, float chunk_maximum, float chunk_weight, const float * chunk_sums) const {
        if (chunk_weight == 0.0f) {
            return; // it hides all its keys from this row
        }
        if (chunk_maximum > maximum) {
            const float factor = expf(maximum - chunk_maximum);
            weight = fmaf(weight, factor, chunk_weight);
            for (int d = 0; d < shape.width_v; d += KNAPSPEC_LANES) {
                v_store(sums + d, v_fma(v_load(sums + d), v_set(factor), v_load(chunk_sums + d)));
            }
            maximum = chunk_maximum;
        } else {
            const float factor = expf(chunk_maximum - maximum);
            weight = fmaf(chunk_weight, factor, weight);
            for (int d = 0; d < shape.width_v; d += KNAPSPEC_LANES) {
                v_store(sums + d, v_fma(v_load(chunk_sums + d), v_set(factor), v_load(sums + d)));
            }
        }
    }

    // The sink takes its share, then the weights are made to sum to 1.
    void finish(int head, float maximum, float weight, const float * sums, float * out) const {
        float factor = 1.0f;
        if (sinks) {
            const float sink = ((const float *) sinks->data)[head];
            if (sink > maximum) {
                factor = expf(maximum - sink);
                weight = fmaf(weight, factor, 1.0f);
            } else {
                weight += expf(sink - maximum);
            }
        }
        const float inverse = weight == 0.0f ? 0.0f : factor/weight;
        for (int d = 0; d < shape.width_v; d += KNAPSPEC_LANES) {
            // hidden values may turn -0 into 0 or not; added to 0 both are 0
            v_store(out + d, v_add(v_mul(v_load(sums + d), v_set(inverse)), v_zero()));
        }
    }

    const char * rows_of(const ggml_tensor * t, int stream, int cell, int head_kv) const {
        return (const char *) t->data + cell*t->nb[1] + head_kv*t->nb[2] + stream/(q->ne[3]/t->ne[3])*t->nb[3];
    }

    Prefetch prefetch(const Tile * tile, int head_kv) const {
        if (!tile || shape.n_keys - tile->index*TILE < TILE) {
            return Prefetch();
        }
        const int rows = shape.strip*shape.group, blocks = (rows + BLOCK_ROWS - 1)/BLOCK_ROWS;
        const int turns = TILE/(2*KNAPSPEC_LANES)*(shape.width_k/8);
        const int columns = std::max(1, shape.width_v/(KNAPSPEC_BLOCK*KNAPSPEC_LANES));
        const int ticks = turns*TURN_TICKS + rows*ROW_TICKS + blocks*(TILE/(KNAPSPEC_BLOCK*KNAPSPEC_LANES)*shape.width_k + columns*TILE);
        const int first = tile->index*TILE;
        return Prefetch({ rows_of(k, tile->stream, first, head_kv), k->nb[1], (int) ggml_row_size(k->type, shape.width_k) },
                        { rows_of(v, tile->stream, first, head_kv), v->nb[1], (int) ggml_row_size(v->type, shape.width_v) }, ticks);
    }

    // The first n rows of a tile, and zeros.
    const char * pad(const char * rows, size_t stride, size_t bytes, int n, char * to) const {
        for (int i = 0; i < n; i++) {
            memcpy(to + i*bytes, rows + i*stride, bytes);
        }
        memset(to + n*bytes, 0, (TILE - n)*bytes);
        return to;
    }

    const ggml_fp16_t * mask_of_tile(int stream, int token, int first, int n) const {
        if (n == TILE) {
            return mask_row(stream, token) + first;
        }
        ggml_fp16_t * to = at<ggml_fp16_t>(mine, layout.tail_mask);
        for (int i = 0; i < TILE; i++) {
            to[i] = i >= n ? MASKED : mask ? mask_row(stream, token)[first + i] : 0;
        }
        return to;
    }

    // Logits of one row become weights; its sums so far are scaled to the new maximum.
    void soften(float * logits, const ggml_fp16_t * m, float slope, float & maximum, float & weight, float * sums) const {
        constexpr int C = TILE/KNAPSPEC_LANES;
        vf x[C], top = v_set(-INFINITY);
        for (int c = 0; c < C; c++) {
            x[c] = v_load(logits + c*KNAPSPEC_LANES);
            if (softcap != 0.0f) {
                x[c] = v_mul(v_set(softcap), v_tanh(x[c]));
            }
            if (m) {
                const vf bias = v_mul(v_set(slope), v_load(m + c*KNAPSPEC_LANES));
                // a hidden key counts for nothing even if its logit is not a number
                x[c] = v_select_equal(bias, v_set(-INFINITY), bias, v_add(x[c], bias));
            }
            top = v_max(x[c], top);
        }
        const float largest = v_reduce_max(top);
        if (largest > maximum) {
            if (weight != 0.0f) {
                const float factor = expf(maximum - largest);
                weight *= factor;
                for (int d = 0; d < shape.width_v; d += KNAPSPEC_LANES) {
                    v_store(sums + d, v_mul(v_load(sums + d), v_set(factor)));
                }
            }
            maximum = largest;
        }
        const vf reference = v_set(maximum == -INFINITY ? 0.0f : maximum);
        vf sum = v_zero();
        for (int c = 0; c < C; c++) {
            const vf w = ggml_v_expf(v_sub(x[c], reference));
            sum = v_add(sum, w);
            v_store(logits + c*KNAPSPEC_LANES, w);
        }
        weight += v_reduce_add(sum);
    }

    void add_rows(int rows, bool are_f16, const float * weights, const char * values, size_t stride, float * sums,
                  Prefetch & ahead) const {
        if (are_f16) {
            KNAPSPEC_ROWS(rows, (add_values<R, ggml_fp16_t>(weights, values, stride, sums, shape.width_v, ahead)))
        } else {
            KNAPSPEC_ROWS(rows, (add_values<R, float>(weights, values, stride, sums, shape.width_v, ahead)))
        }
    }

    // Not inlined, so that all rows meet the same instructions.
    KNAPSPEC_NOINLINE void compute_tile(const Tile & tile, const Rows & rows, const Tile * next, int next_head) {
        const int stream = tile.stream, head_kv = rows.head_kv, first = tile.index*TILE;
        const uint8_t * state = states(stream, tile.index) + rows.token;
        const char * keys   = rows_of(k, stream, first, head_kv);
        const char * values = rows_of(v, stream, first, head_kv);
        size_t stride_k = k->nb[1], stride_v = v->nb[1];
        const size_t bytes_k = ggml_row_size(k->type, shape.width_k), bytes_v = ggml_row_size(v->type, shape.width_v);

        Prefetch ahead = prefetch(next, next_head);
        const int n = std::min(TILE, shape.n_keys - first);
        if (n < TILE) {
            keys   = pad(keys,   stride_k, bytes_k, n, at<char>(mine, layout.tail_k));
            values = pad(values, stride_v, bytes_v, n, at<char>(mine, layout.tail_v));
            stride_k = bytes_k;
            stride_v = bytes_v;
        }

        // converted once where many blocks of rows read it, otherwise in the multiplication
        const bool convert_once = rows.n_tokens*shape.group > 4*BLOCK_ROWS;
        float * keys_f32 = at<float>(mine, layout.keys_f32);
        float * values_f32 = at<float>(mine, layout.values_f32);
        const ggml_fp16_t * keys_f16 = nullptr;
        if (k->type == GGML_TYPE_F16) {
            ggml_fp16_t * turned = at<ggml_fp16_t>(mine, layout.keys);
            turn_keys_f16(keys, stride_k, shape.width_k, turned, ahead);
            if (convert_once) {
                convert(turned, keys_f32, shape.width_k*TILE);
            } else {
                keys_f16 = turned;
            }
        } else {
            turn_keys_q8_0(keys, stride_k, shape.width_k, keys_f32);
        }
        const bool values_are_f16 = v->type == GGML_TYPE_F16 && !convert_once;
        if (v->type == GGML_TYPE_Q8_0) {
            values_from_q8_0(values, stride_v, shape.width_v, values_f32);
        } else if (convert_once) {
            for (int key = 0; key < TILE; key++) {
                convert((const ggml_fp16_t *) (values + key*stride_v), values_f32 + key*shape.width_v, shape.width_v);
            }
        }
        if (!values_are_f16) {
            values   = (const char *) values_f32;
            stride_v = sizeof(float)*shape.width_v;
        }

        float * logits = at<float>(mine, layout.logits);
        // runs of tokens that see something of this tile
        for (int j0 = 0; j0 < rows.n_tokens; j0++) {
            if (state[j0] == HIDDEN) {
                continue;
            }
            int j1 = j0;
            bool partial = false;
            for (; j1 < rows.n_tokens && state[j1] != HIDDEN; j1++) {
                partial |= state[j1] == PARTIAL;
            }
            const bool careful = partial && !(values_are_f16
                ? are_finite<uint16_t>(values, stride_v, shape.width_v)
                : are_finite<uint32_t>(values, stride_v, shape.width_v));
            const int r0 = j0*shape.group, n_rows = (j1 - j0)*shape.group, blocks = (n_rows + BLOCK_ROWS - 1)/BLOCK_ROWS;
            for (int b = 0; b < blocks; b++) {
                const int row = r0 + n_rows*b/blocks, count = r0 + n_rows*(b + 1)/blocks - row;
                const float * x = rows.queries + (size_t) row*shape.width_k;
                if (keys_f16) {
                    KNAPSPEC_ROWS(count, weigh<R>(x, shape.width_k, keys_f16, logits, ahead))
                } else {
                    KNAPSPEC_ROWS(count, weigh<R>(x, shape.width_k, keys_f32, logits, ahead))
                }
                float * to = rows.sums + (size_t) row*shape.width_v;
                for (int r = 0; r < count; r++) {
                    ahead.tick(ROW_TICKS);
                    const int token = (row + r)/shape.group, head = head_kv*shape.group + (row + r)%shape.group;
                    const ggml_fp16_t * m = state[token] == PARTIAL ? mask_of_tile(stream, rows.token + token, first, n) : nullptr;
                    soften(logits + r*TILE, m, at<float>(mine, layout.slopes)[head],
                           rows.maxima[row + r], rows.weights[row + r], to + r*shape.width_v);
                    if (careful && m) {
                        if (values_are_f16) {
                            add_seen_values<ggml_fp16_t>(logits + r*TILE, m, values, stride_v, to + r*shape.width_v, shape.width_v);
                        } else {
                            add_seen_values<float>(logits + r*TILE, m, values, stride_v, to + r*shape.width_v, shape.width_v);
                        }
                    } else if (careful) {
                        add_rows(1, values_are_f16, logits + r*TILE, values, stride_v, to + r*shape.width_v, ahead);
                    }
                }
                if (!careful) {
                    add_rows(count, values_are_f16, logits, values, stride_v, to, ahead);
                }
            }
            j0 = j1;
        }
    }
};

bool is_served_type(ggml_type type) {
    return type == GGML_TYPE_F16 || type == GGML_TYPE_Q8_0;
}

} // namespace

namespace knapspec {

const char * attention_declines(const ggml_tensor * op) {
    const ggml_tensor * q = op->src[0];
    const ggml_tensor * k = op->src[1];
    const ggml_tensor * v = op->src[2];
    const ggml_tensor * mask = op->src[3];
    if (ggml_is_empty(q) || ggml_is_empty(k) || ggml_is_empty(v)) {
        return "nothing to compute";
    }
    if (q->type != GGML_TYPE_F32 || !is_served_type(k->type) || !is_served_type(v->type)) {
        return "a type other than F16 and Q8_0";
    }
    for (const ggml_tensor * t : { k, v }) {
        if (t->ne[0]%(t->type == GGML_TYPE_Q8_0 ? QK8_0 : 16) != 0 || t->ne[0] > MAX_WIDTH) {
            return "head width";
        }
        if (t->nb[0] != ggml_type_size(t->type) || q->ne[3]%t->ne[3] != 0) {
            return "layout of keys or values";
        }
    }
    if (k->ne[1] != v->ne[1] || k->ne[2] != v->ne[2] || q->ne[2]%k->ne[2] != 0 || k->ne[1] > (1 << 24)) {
        return "heads";
    }
    if (mask && (mask->type != GGML_TYPE_F16 || mask->ne[2] != 1 || mask->nb[0] != sizeof(ggml_fp16_t))) {
        return "a mask per head";
    }
    return nullptr;
}

size_t attention_work_size(int n_threads, const ggml_tensor * op) {
    return attention_declines(op) ? 0 : Layout(Shape(op), op, n_threads).total;
}

bool attention(const ggml_compute_params * params, ggml_tensor * op) {
    if (attention_declines(op)) {
        return false;
    }
    Attention(params, op).compute();
    return true;
}

} // namespace knapspec

#else

namespace knapspec {

const char * attention_declines(const ggml_tensor *) {
    return "no kernel for these instructions";
}

size_t attention_work_size(int, const ggml_tensor *) {
    return 0;
}

bool attention(const ggml_compute_params *, ggml_tensor *) {
    return false;
}

} // namespace knapspec

#endif
