#include "knapspec-matmul.h"

#include "knapspec-amx.h"
#include "knapspec-quantize.h"
#include "knapspec-weights.h"

#include "amx/amx.h"
#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "repack.h"
#include "simd-mappings.h"
#include "traits.h"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>
#include <optional>
#include <typeinfo>
#include <utility>

namespace knapspec {

#ifdef KNAPSPEC_SIMD

namespace {

// Columns are computed in panels of about equal size, which read a tile of weights from the cache again: more accumulators
// than this do not fit into registers.
constexpr int panel_columns = 8;
// Tiles hold the sums themselves.
constexpr int amx_panel_columns = 16;

struct panels {
    int n;     // columns
    int count;
    int small; // columns of the later panels
    int n_big; // the first panels have one more

    panels(int n, int most) : n(n), count((n + most - 1)/most), small(n/count), n_big(n % count) {}

    int size (int panel)  const { return small + (panel < n_big); }
    int first(int panel)  const { return panel*small + std::min(panel, n_big); }
    int of   (int column) const {
        const int in_big = n_big*(small + 1);
        return column < in_big ? column/(small + 1) : n_big + (column - in_big)/small;
    }
};

// ---- activations, quantised by ggml and laid out for the kernels: per block those of all columns of a panel

enum class family { none, blocks_32, blocks_256, floats };

// blocks of 32: 32 bytes of each column, then per column -zero*sum (int32), d (float), s (float)
constexpr int block_32_bytes(int n) { return n*(32 + 4 + 4 + 4); }
// blocks of 256: 256 bytes of each column, then 16 sums of 16 or 8 sums of 32 (int16), then d (float)
constexpr int block_256_bytes(int n) { return n*(256 + 32 + 4); }

// ---- kernels: one tile of rows or a few, `tile_stride` bytes apart, and one panel. Results are tiles [column][row].

// With few columns one tile at a time keeps too few reads of memory under way. Plain rows are many streams anyway.
constexpr int most_tiles = 4;

template <class W, int n_columns, int n_tiles> struct kernel_32 {
    static void run(const uint8_t * tile, size_t tile_stride, size_t row_bytes, int64_t n_blocks, const uint8_t * x, float * y) {
        W w(tile, row_bytes);
        vfloat acc[n_tiles][n_columns];
        KNAPSPEC_UNROLL for (int t = 0; t < n_tiles; t++) {
            KNAPSPEC_UNROLL for (int c = 0; c < n_columns; c++) {
                acc[t][c] = set_f(0);
            }
        }
        // what lies ahead of a short tile is one of those that are being read
        const bool ahead = n_tiles < most_tiles || tile_stride > 16384;
        for (int64_t i = 0; i < n_blocks; i++) {
            KNAPSPEC_UNROLL for (int t = 0; t < n_tiles; t++) {
                vint   v[8];
                vfloat d;
                typename W::extra m; // of the rows: minima, or what a sum is too large by
                if constexpr (n_tiles == 1) {
                    w.read(v, d, m);
                } else {
                    W(tile + t*tile_stride + i*W::bytes, row_bytes, ahead).read(v, d, m);
                }
                KNAPSPEC_UNROLL for (int c = 0; c < n_columns; c++) {
                    const uint8_t * of_column = x + 32*n_columns + 4*c;
                    const vint s = dot_32<W>(W::zero ? load_i32(of_column) : 0, v, x + 32*c, m);
                    acc[t][c] = fma(mul(d, set_f(load_f32(of_column + 4*n_columns))), to_float(s), acc[t][c]);
                    if constexpr (W::has_min) {
                        acc[t][c] = fma(m, set_f(load_f32(of_column + 8*n_columns)), acc[t][c]);
                    }
                }
            }
            x += block_32_bytes(n_columns);
        }
        KNAPSPEC_UNROLL for (int t = 0; t < n_tiles; t++) {
            KNAPSPEC_UNROLL for (int c = 0; c < n_columns; c++) {
                store_f(y + (t*n_columns + c)*n_lanes, acc[t][c]);
            }
        }
    }
};

template <class W, int n_columns, int> struct kernel_256 {
    static void run(const uint8_t * tile, size_t, size_t row_bytes, int64_t n_blocks, const uint8_t * x, float * y) {
        W w(tile, row_bytes);
        vfloat acc[n_columns];
        KNAPSPEC_UNROLL for (int c = 0; c < n_columns; c++) {
            acc[c] = set_f(0);
        }
        for (int64_t i = 0; i < n_blocks; i++) {
            constexpr int n_pairs = W::has_min ? 4 : 8;
            vint   pairs[n_pairs];
            vfloat d, dmin, sum[n_columns];
            w.begin_super(d, dmin, pairs);
            const uint8_t * scale = x + (256 + 32)*n_columns;
            KNAPSPEC_UNROLL for (int c = 0; c < n_columns; c++) {
                const uint8_t * sums = x + 256*n_columns + 32*c;
                vint t = set_i(0);
                KNAPSPEC_UNROLL for (int p = 0; p < n_pairs; p++) {
                    t = dot_16(t, pairs[p], set_i(load_i32(sums + 4*p)));
                }
                if constexpr (W::has_min) {
                    acc[c] = fnma(mul(dmin, set_f(load_f32(scale + 4*c))), to_float(t), acc[c]);
                    sum[c] = set_f(0);
                } else {
                    sum[c] = mul(set_f(-W::zero), to_float(t));
                }
            }
            for (int k = 0; k < W::n_chunks; k++) {
                w.chunk(k, [&](int g, const vint * u, vfloat s) {
                    KNAPSPEC_UNROLL for (int c = 0; c < n_columns; c++) {
                        const vint t = dot_group<W::group/4, W::largest>(set_i(0), u, x + 256*c + W::group*g);
                        sum[c] = fma(s, to_float(t), sum[c]);
                    }
                });
            }
            w.end_super();
            KNAPSPEC_UNROLL for (int c = 0; c < n_columns; c++) {
                acc[c] = fma(mul(d, set_f(load_f32(scale + 4*c))), sum[c], acc[c]);
            }
            x += block_256_bytes(n_columns);
        }
        KNAPSPEC_UNROLL for (int c = 0; c < n_columns; c++) {
            store_f(y + c*n_lanes, acc[c]);
        }
    }
};

#ifdef KNAPSPEC_AMX

// The same products with the sums of integers left to tiles: what follows them is done in the same order, so a column has the
// same bits whichever of the two computes it.

// Blocks that are unpacked before tiles read them: a tile cannot be loaded from stores that are still under way.
constexpr int run_blocks = 8;

template <class W, int n_columns, int n_tiles> struct amx_kernel_32 {
    static void run(const uint8_t * tile, size_t tile_stride, size_t row_bytes, int64_t n_blocks, const uint8_t * x, float * y) {
        vfloat acc[n_tiles][n_columns];
        KNAPSPEC_UNROLL for (int t = 0; t < n_tiles; t++) {
            KNAPSPEC_UNROLL for (int c = 0; c < n_columns; c++) {
                acc[t][c] = set_f(0);
            }
        }
        alignas(64) uint8_t bytes[n_tiles][run_blocks][8*64];
        alignas(64) int32_t sums [n_tiles][n_columns*n_lanes];
        for (int64_t i = 0; i < n_blocks; i++) {
            if (!W::is_signed && i % run_blocks == 0) { // nibbles
                for (int j = 0; j < (int) std::min<int64_t>(run_blocks, n_blocks - i); j++) {
                    KNAPSPEC_UNROLL for (int t = 0; t < n_tiles; t++) {
                        vint   v[8];
                        vfloat d;
                        typename W::extra m;
                        W(tile + t*tile_stride + (i + j)*W::bytes, row_bytes).read(v, d, m);
                        KNAPSPEC_UNROLL for (int q = 0; q < 8; q++) {
                            store_i(bytes[t][j] + 64*q, v[q]);
                        }
                    }
                }
            }
            vfloat d[n_tiles], m[n_tiles];
            tile_load<tile_a>(x, 32);
            KNAPSPEC_UNROLL for (int t = 0; t < n_tiles; t++) {
                W w(tile + t*tile_stride + i*W::bytes, row_bytes);
                const uint8_t * b = W::is_signed ? w.p : bytes[t][i % run_blocks];
                vint v[8];
                typename W::extra extra;
                w.read(v, d[t], extra);
                if constexpr (W::has_min) {
                    m[t] = extra;
                }
                if (t == 0) {
                    tile_product<0>(b, sums[t]);
                } else {
                    tile_product<1>(b, sums[t]);
                }
            }
            KNAPSPEC_UNROLL for (int t = 0; t < n_tiles; t++) {
                KNAPSPEC_UNROLL for (int c = 0; c < n_columns; c++) {
                    const uint8_t * of_column = x + 32*n_columns + 4*c;
                    vint s = load_i(sums[t] + c*n_lanes);
                    if constexpr (W::zero != 0) {
                        s = add_i(s, set_i(load_i32(of_column)));
                    }
                    acc[t][c] = fma(mul(d[t], set_f(load_f32(of_column + 4*n_columns))), to_float(s), acc[t][c]);
                    if constexpr (W::has_min) {
                        acc[t][c] = fma(m[t], set_f(load_f32(of_column + 8*n_columns)), acc[t][c]);
                    }
                }
            }
            x += block_32_bytes(n_columns);
        }
        KNAPSPEC_UNROLL for (int t = 0; t < n_tiles; t++) {
            KNAPSPEC_UNROLL for (int c = 0; c < n_columns; c++) {
                store_f(y + (t*n_columns + c)*n_lanes, acc[t][c]);
            }
        }
    }
};

template <class W, int n_columns, int> struct amx_kernel_256 {
    static void run(const uint8_t * tile, size_t, size_t row_bytes, int64_t n_blocks, const uint8_t * x, float * y) {
        W w(tile, row_bytes);
        constexpr int n_groups = 256/W::group, n_dwords = W::group/4;
        vfloat acc[n_columns];
        alignas(64) uint8_t bytes [n_groups][n_dwords*64];
        alignas(64) float   scales[n_groups][n_lanes];
        alignas(64) int32_t sums [2][n_columns*n_lanes];
        KNAPSPEC_UNROLL for (int c = 0; c < n_columns; c++) {
            acc[c] = set_f(0);
        }
        for (int64_t i = 0; i < n_blocks; i++) {
            constexpr int n_pairs = W::has_min ? 4 : 8;
            vint   pairs[n_pairs];
            vfloat d, dmin, sum[n_columns];
            w.begin_super(d, dmin, pairs);
            const uint8_t * scale = x + (256 + 32)*n_columns;
            KNAPSPEC_UNROLL for (int c = 0; c < n_columns; c++) {
                const uint8_t * of_column = x + 256*n_columns + 32*c;
                vint t = set_i(0);
                KNAPSPEC_UNROLL for (int p = 0; p < n_pairs; p++) {
                    t = dot_16(t, pairs[p], set_i(load_i32(of_column + 4*p)));
                }
                if constexpr (W::has_min) {
                    acc[c] = fnma(mul(dmin, set_f(load_f32(scale + 4*c))), to_float(t), acc[c]);
                    sum[c] = set_f(0);
                } else {
                    sum[c] = mul(set_f(-W::zero), to_float(t));
                }
            }
            for (int k = 0; k < W::n_chunks; k++) {
                w.chunk(k, [&](int g, const vint * u, vfloat s) {
                    KNAPSPEC_UNROLL for (int q = 0; q < n_dwords; q++) {
                        store_i(bytes[g] + 64*q, u[q]);
                    }
                    store_f(scales[g], s);
                });
            }
            for (int g = 0; g < n_groups; g++) {
                tile_load<tile_a>(x + W::group*g, 256);
                tile_product<0>(bytes[g], sums[g & 1]);
                const vfloat s = load_f(scales[g]);
                KNAPSPEC_UNROLL for (int c = 0; c < n_columns; c++) {
                    sum[c] = fma(s, to_float(load_i(sums[g & 1] + c*n_lanes)), sum[c]);
                }
            }
            w.end_super();
            KNAPSPEC_UNROLL for (int c = 0; c < n_columns; c++) {
                acc[c] = fma(mul(d, set_f(load_f32(scale + 4*c))), sum[c], acc[c]);
            }
            x += block_256_bytes(n_columns);
        }
        KNAPSPEC_UNROLL for (int c = 0; c < n_columns; c++) {
            store_f(y + c*n_lanes, acc[c]);
        }
    }
};

#endif // KNAPSPEC_AMX

using kernel_function = void (*)(const uint8_t *, size_t, size_t, int64_t, const uint8_t *, float *);

struct kernel {
    int             n_tiles; // that `several` computes
    kernel_function several, one;
};

template <template <class, int, int> class K, class W, bool packed> kernel of_columns(int n) {
    constexpr int four = packed ? most_tiles : 1, two = packed ? 2 : 1;
    constexpr int many = W::has_min ? 1 : two; // minima need registers too
    static const kernel all[panel_columns] = {
        { four, K<W, 1, four>::run, K<W, 1, 1>::run }, { four, K<W, 2, four>::run, K<W, 2, 1>::run },
        { two,  K<W, 3, two>::run,  K<W, 3, 1>::run }, { two,  K<W, 4, two>::run,  K<W, 4, 1>::run },
        { two,  K<W, 5, two>::run,  K<W, 5, 1>::run }, { two,  K<W, 6, two>::run,  K<W, 6, 1>::run },
        { many, K<W, 7, many>::run, K<W, 7, 1>::run }, { many, K<W, 8, many>::run, K<W, 8, 1>::run },
    };
    return all[n - 1];
}

#ifdef KNAPSPEC_AMX

template <template <class, int, int> class K, class W, int at_once, int... n>
kernel of_amx_columns(int n_columns, std::integer_sequence<int, n...>) {
    static const kernel all[] = {
        { n < 8 ? at_once : 1, K<W, n + 1, n < 8 ? at_once : 1>::run, K<W, n + 1, 1>::run }...
    };
    return all[n_columns - 1];
}

template <template <class, int, int> class K, class W, int at_once> kernel of_amx_columns(int n_columns) {
    return of_amx_columns<K, W, at_once>(n_columns, std::make_integer_sequence<int, amx_panel_columns>());
}

#endif

// ---- 16-bit floats: lanes run along a row, several rows at once

struct load_f16 {
    static KNAPSPEC_INLINE vfloat lanes(const void * p) { return load_half(p); }
};

struct load_bf16 {
    static KNAPSPEC_INLINE vfloat lanes(const void * p) { return knapspec::load_bf16(p); }
};

template <class W, int n_rows, int n_columns>
void float_rows(const uint8_t * w, size_t row_bytes, int64_t n, const float * x, int64_t x_stride, float * const * y) {
    vfloat acc[n_rows][n_columns];
    KNAPSPEC_UNROLL for (int r = 0; r < n_rows; r++) {
        KNAPSPEC_UNROLL for (int c = 0; c < n_columns; c++) {
            acc[r][c] = set_f(0);
        }
    }
    const int64_t whole = n - n % n_lanes;
    for (int64_t k = 0; k < whole; k += n_lanes) {
        vfloat v[n_rows];
        KNAPSPEC_UNROLL for (int r = 0; r < n_rows; r++) {
            v[r] = W::lanes(w + r*row_bytes + 2*k);
        }
        KNAPSPEC_UNROLL for (int c = 0; c < n_columns; c++) {
            const vfloat u = load_f(x + c*x_stride + k);
            KNAPSPEC_UNROLL for (int r = 0; r < n_rows; r++) {
                acc[r][c] = fma(v[r], u, acc[r][c]);
            }
        }
    }
    if (whole < n) { // activations are padded with zeros
        for (int r = 0; r < n_rows; r++) {
            uint16_t rest[n_lanes] = {};
            memcpy(rest, w + r*row_bytes + 2*whole, 2*(n - whole));
            const vfloat v = W::lanes(rest);
            KNAPSPEC_UNROLL for (int c = 0; c < n_columns; c++) {
                acc[r][c] = fma(v, load_f(x + c*x_stride + whole), acc[r][c]);
            }
        }
    }
    KNAPSPEC_UNROLL for (int r = 0; r < n_rows; r++) {
        KNAPSPEC_UNROLL for (int c = 0; c < n_columns; c++) {
            y[c][r] = sum_lanes(acc[r][c]);
        }
    }
}

using float_function = void (*)(const uint8_t *, size_t, int64_t, const float *, int64_t, float * const *);

struct float_kernel {
    int            n_rows; // that `several` computes
    float_function several, one;
};

template <class W, int n_columns> constexpr float_kernel float_kernel_of() {
    // as many accumulators as leave registers for the weights and one activation
    constexpr int n_rows = n_registers == 32 ? (n_columns <= 4 ? 6 : n_columns <= 6 ? 4 : 3)
                                             : (n_columns == 1 ? 6 : n_columns == 2 ? 4 : n_columns == 3 ? 3 : n_columns <= 6 ? 2 : 1);
    return { n_rows, float_rows<W, n_rows, n_columns>, float_rows<W, 1, n_columns> };
}

template <class W> float_kernel float_kernel_for(int n) {
    static const float_kernel all[panel_columns] = {
        float_kernel_of<W, 1>(), float_kernel_of<W, 2>(), float_kernel_of<W, 3>(), float_kernel_of<W, 4>(),
        float_kernel_of<W, 5>(), float_kernel_of<W, 6>(), float_kernel_of<W, 7>(), float_kernel_of<W, 8>(),
    };
    return all[n - 1];
}

// ---- what is covered

// packed: by ggml's CPU_REPACK, 4 or 8 bytes of each row side by side
enum class layout { none, plain, amx, packed_4, packed_8 };

#if KNAPSPEC_SIMD == 128
// What packed a weight has a private type of upstream's, with the packing among its template arguments. Where this is not
// found in the type's name, upstream computes.
layout packing_of(const ggml_tensor * w) {
    const char * name = w->extra ? typeid(*(const ggml::cpu::tensor_traits *) w->extra).name() : "";
    const int    rows = ggml_blck_size(w->type) == 32 ? 4 : 8;
    for (const int unit : { 4, 8 }) {
        for (const char integer : { 'l', 'x' }) { // int64_t as long or as long long
            char arguments[16];
            snprintf(arguments, sizeof(arguments), "L%c%dEL%c%dE", integer, unit, integer, rows);
            if (strstr(name, arguments)) {
                return unit == 4 ? layout::packed_4 : layout::packed_8;
            }
        }
    }
    return layout::none;
}
#endif

layout layout_of(const ggml_tensor * w) {
    const ggml_backend_buffer_t buffer = w->view_src ? w->view_src->buffer : w->buffer;
    if (!buffer || ggml_backend_buffer_is_host(buffer)) {
        return layout::plain; // a graph without buffers lies in host memory
    }
#if defined(__AMX_INT8__) && defined(__AVX512VNNI__)
    if (buffer->buft == ggml_backend_amx_buffer_type() && !w->view_src) {
        return w->type == GGML_TYPE_F16 ? layout::plain : layout::amx;
    }
#endif
#if KNAPSPEC_SIMD == 128
    if (buffer->buft == ggml_backend_cpu_repack_buffer_type() && !w->view_src) {
        return packing_of(w);
    }
#endif
    return layout::none;
}

family family_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q8_0: case GGML_TYPE_Q4_0: case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q5_0: case GGML_TYPE_Q5_1: case GGML_TYPE_IQ4_NL: return family::blocks_32;
        case GGML_TYPE_Q4_K: case GGML_TYPE_Q5_K: case GGML_TYPE_Q6_K:   return family::blocks_256;
        case GGML_TYPE_F16:  case GGML_TYPE_BF16:                        return family::floats;
        default:                                                         return family::none;
    }
}

struct weight_format {
    int    zero       = 0; // what is taken from the unsigned weights, in blocks of 32
    bool   offset     = false; // activations as unsigned bytes, 128 added
    bool   sums_of_32 = false;
    size_t tile_bytes = 0; // of one block of n_lanes rows; 0: plain rows
    kernel (*kernel_of)(int n_columns) = nullptr;
    int    most_columns = panel_columns; // of one panel
    int    dot_bytes    = 0; // of a column that an AMX tile multiplies at once; 0: no tiles
    bool   pairs        = false; // of tiles that lie interleaved; a reader is told which one instead of a stride
};

template <class W, bool packed> weight_format format_32() {
    return { W::zero, W::is_signed, false, packed ? W::bytes : 0, of_columns<kernel_32, W, packed> };
}

template <class W, bool packed> weight_format format_256() {
    return { 0, false, W::group == 32, packed ? W::bytes : 0, of_columns<kernel_256, W, false> };
}

#if KNAPSPEC_SIMD == 128

template <class W> weight_format packed_format_256() {
    weight_format f = format_256<W, true>();
    f.pairs = true;
    return f;
}

template <int unit> weight_format packed_format(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q8_0:   return format_32 <packed_q8_0  <unit>, true>();
        case GGML_TYPE_Q4_0:   return format_32 <packed_q4_0  <unit>, true>();
        case GGML_TYPE_IQ4_NL: return format_32 <packed_iq4_nl<unit>, true>();
        case GGML_TYPE_Q4_K:   return packed_format_256<packed_q4_k<unit>>();
        case GGML_TYPE_Q5_K:   return packed_format_256<packed_q5_k<unit>>();
        case GGML_TYPE_Q6_K:   return packed_format_256<packed_q6_k<unit>>();
        default:               return {};
    }
}

#endif

#ifdef KNAPSPEC_AMX

template <class W> weight_format amx_format_32() {
    return { W::zero, false, false, W::bytes, of_amx_columns<amx_kernel_32, W, 2>, amx_panel_columns, 32 };
}

template <class W> weight_format amx_format_256() {
    return { 0, false, W::group == 32, W::bytes, of_amx_columns<amx_kernel_256, W, 1>, amx_panel_columns, W::group };
}

// From how many columns on tiles are faster than registers: they take almost as long for one column as for eight, and nibbles
// have to be unpacked into memory for them. For Q6_K, whose groups fill a quarter of a tile, they never are.
int least_amx_columns(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q8_0:                       return 4;
        case GGML_TYPE_Q4_0: case GGML_TYPE_Q4_1:  return 8;
        case GGML_TYPE_Q4_K: case GGML_TYPE_Q5_K:  return 9;
        default:                                   return INT_MAX;
    }
}

#endif

weight_format format_of(ggml_type type, layout where, [[maybe_unused]] int n_columns) {
    if (where == layout::plain) {
        switch (type) {
            case GGML_TYPE_Q8_0: return format_32 <plain_q8_0, false>();
            case GGML_TYPE_Q4_0: return format_32 <plain_q4_0, false>();
            case GGML_TYPE_Q4_1: return format_32 <plain_q4_1, false>();
            case GGML_TYPE_Q5_0: return format_32 <plain_q5_0, false>();
            case GGML_TYPE_Q5_1: return format_32 <plain_q5_1, false>();
            case GGML_TYPE_IQ4_NL: return format_32<plain_iq4_nl, false>();
            case GGML_TYPE_Q4_K: return format_256<plain_q4_k, false>();
            case GGML_TYPE_Q5_K: return format_256<plain_q5_k, false>();
            case GGML_TYPE_Q6_K: return format_256<plain_q6_k, false>();
            default: break;
        }
    }
#ifdef KNAPSPEC_AMX
    if (where == layout::amx && n_columns >= least_amx_columns(type)) {
        switch (type) {
            case GGML_TYPE_Q8_0: return amx_format_32 <amx_q8_0>();
            case GGML_TYPE_Q4_0: return amx_format_32 <amx_q4_0>();
            case GGML_TYPE_Q4_1: return amx_format_32 <amx_q4_1>();
            case GGML_TYPE_Q4_K: return amx_format_256<amx_q4_k>();
            case GGML_TYPE_Q5_K: return amx_format_256<amx_q5_k>();
            default: break;
        }
    }
    if (where == layout::amx) {
        switch (type) {
            case GGML_TYPE_Q8_0: return format_32 <amx_q8_0, true>();
            case GGML_TYPE_Q4_0: return format_32 <amx_q4_0, true>();
            case GGML_TYPE_Q4_1: return format_32 <amx_q4_1, true>();
            case GGML_TYPE_Q4_K: return format_256<amx_q4_k, true>();
            case GGML_TYPE_Q5_K: return format_256<amx_q5_k, true>();
            case GGML_TYPE_Q6_K: return format_256<amx_q6_k, true>();
            default: break;
        }
    }
#endif
#if KNAPSPEC_SIMD == 128
    if (where == layout::packed_4) {
        return packed_format<4>(type);
    }
    if (where == layout::packed_8) {
        return packed_format<8>(type);
    }
#endif
    return {};
}

weight_format format_of(const ggml_tensor * op) {
    return format_of(op->src[0]->type, layout_of(op->src[0]), (int) std::min<int64_t>(ggml_nrows(op->src[1]), INT_MAX));
}

// Beyond max_columns, where that is faster than upstream: its AMX tiles, and with AVX-512 its tiled K-quants, are faster yet
// on many columns. On ARM nothing was measured.
int64_t most_columns(const ggml_tensor * w) {
    if (KNAPSPEC_SIMD != 128 && layout_of(w) == layout::plain) {
        switch (family_of(w->type)) {
            case family::blocks_32:  return INT_MAX;
            case family::blocks_256: return KNAPSPEC_SIMD == 512 ? 32 : INT_MAX;
            default:                 break;
        }
    }
    return max_columns;
}

bool covers_product(const ggml_tensor * op) {
    const ggml_tensor * w = op->src[0], * x = op->src[1];
    return op->op == GGML_OP_MUL_MAT
        && w->op == GGML_OP_NONE // not the cache of an attention
        && ggml_get_op_params_i32(op, 1) != GGML_HINT_SRC0_IS_HADAMARD
        && x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float)
        && op->type == GGML_TYPE_F32 && op->nb[0] == sizeof(float)
        && covers_weight(w)
        && ggml_nrows(x) > 0 // none of a prompt's slices but the last asks for logits
        && ggml_nrows(x) <= most_columns(w);
}

size_t aligned(size_t n) { return (n + 63) & ~(size_t) 63; }

// The activations of one product within the work buffer.
struct activations {
    family  kind;
    int64_t n_blocks; // of 32, of 256, or for floats of n_lanes
    panels  columns;

    activations(const ggml_tensor * op, const weight_format & f) :
        kind(family_of(op->src[0]->type)), n_blocks(0), columns((int) ggml_nrows(op->src[1]), f.most_columns) {
        const int64_t per_block = kind == family::blocks_32 ? 32 : kind == family::blocks_256 ? 256 : n_lanes;
        n_blocks = (op->src[0]->ne[0] + per_block - 1)/per_block;
        if (kind == family::floats) {
            n_blocks |= 1; // columns a multiple of 4 KiB apart would meet in the same few places of the first cache
        }
    }

    size_t block_bytes(int n) const {
        return kind == family::blocks_32 ? block_32_bytes(n) : kind == family::blocks_256 ? block_256_bytes(n) : n*n_lanes*sizeof(float);
    }
    int64_t float_stride() const { return n_blocks*n_lanes; }
    size_t panel_offset(int panel) const {
        const int big = std::min(panel, columns.n_big);
        return big*aligned(n_blocks*block_bytes(columns.small + 1)) + (panel - big)*aligned(n_blocks*block_bytes(columns.small));
    }
    size_t bytes() const { return panel_offset(columns.count) + 64; }
};

float * column_of(const ggml_tensor * x, int64_t c) {
    if (c < x->ne[1]) { // divisions would cost as much as a small tile
        return (float *) ((char *) x->data + c*x->nb[1]);
    }
    const int64_t i1 = c % x->ne[1], i2 = c/x->ne[1] % x->ne[2], i3 = c/x->ne[1]/x->ne[2];
    return (float *) ((char *) x->data + i1*x->nb[1] + i2*x->nb[2] + i3*x->nb[3]);
}

#ifndef KNAPSPEC_QUANTIZE

struct block_of_32 {
    float   d;   // rounded to 16 bits
    float   s;   // scale times sum, rounded to 16 bits
    int32_t sum; // of the bytes
};

block_of_32 quantize_32(const float * x, int flip, uint8_t * out) {
    block_q8_1 b;
    ggml_get_type_traits_cpu(GGML_TYPE_Q8_1)->from_float(x, &b, 32);
    int32_t sum = 0;
    for (int i = 0; i < 32; i++) {
        sum += b.qs[i];
        out[i] = (uint8_t) (b.qs[i] ^ flip);
    }
    ggml_fp16_t halves[2];
    memcpy(halves, &b, 4);
    return { GGML_CPU_FP16_TO_FP32(halves[0]), GGML_CPU_FP16_TO_FP32(halves[1]), sum };
}

float quantize_256(const float * x, uint8_t * out, int16_t * sums) {
    block_q8_K b;
    ggml_get_type_traits_cpu(GGML_TYPE_Q8_K)->from_float(x, &b, 256);
    memcpy(out, b.qs, 256);
    memcpy(sums, b.bsums, 16*sizeof(int16_t));
    return b.d;
}

#endif

// Quantise the blocks [from, to) of column c as upstream does and put them where the kernels want them.
void place_blocks(const activations & a, const ggml_tensor * op, const weight_format & f, int c, int64_t from, int64_t to, uint8_t * base) {
    const float * x = column_of(op->src[1], c);

    const int panel = a.columns.of(c), n = a.columns.size(panel);
    c -= a.columns.first(panel);
    uint8_t * out = base + a.panel_offset(panel) + from*a.block_bytes(n);

    for (int64_t i = from; i < to; i++, out += a.block_bytes(n)) {
        if (a.kind == family::blocks_256) {
            int16_t sums[16];
            const float d = quantize_256(x + 256*i, out + 256*c, sums);
            if (f.sums_of_32) {
                for (int g = 0; g < 8; g++) {
                    sums[g] = (int16_t) (sums[2*g] + sums[2*g + 1]);
                }
            }
            memcpy(out + 256*n + 32*c,       sums, 32);
            memcpy(out + (256 + 32)*n + 4*c, &d,   4);
            continue;
        }
        const block_of_32 b = quantize_32(x + 32*i, f.offset ? 0x80 : 0, out + 32*c);
        const int32_t start = -f.zero*b.sum;
        memcpy(out + 32*n + 4*c, &start, 4);
        memcpy(out + 36*n + 4*c, &b.d,   4);
        memcpy(out + 40*n + 4*c, &b.s,   4);
    }
}

// Column c padded with zeros to whole registers. Upstream rounds it to 16 bits on some paths; nothing here needs that.
void place_floats(const activations & a, const ggml_tensor * op, int c, uint8_t * base) {
    const int64_t n      = op->src[0]->ne[0];
    const int64_t padded = a.float_stride();
    const int     panel  = a.columns.of(c);
    float * out = (float *) (base + a.panel_offset(panel)) + (c - a.columns.first(panel))*padded;
    memcpy(out, column_of(op->src[1], c), n*sizeof(float));
    std::fill(out + n, out + padded, 0.0f);
}

void float_products(const activations & a, const ggml_tensor * op, const uint8_t * x, int64_t from, int64_t to) {
    const ggml_tensor * w = op->src[0];
    for (int panel = 0; panel < a.columns.count; panel++) {
        const int n = a.columns.size(panel);
        const float_kernel k = w->type == GGML_TYPE_F16 ? float_kernel_for<load_f16>(n) : float_kernel_for<load_bf16>(n);
        float * y[panel_columns];
        for (int64_t row = from; row < to;) {
            const bool fits = row + k.n_rows <= to;
            for (int c = 0; c < n; c++) {
                y[c] = column_of(op, a.columns.first(panel) + c) + row;
            }
            (fits ? k.several : k.one)((const uint8_t *) w->data + row*w->nb[1], w->nb[1], w->ne[0],
                (const float *) (x + a.panel_offset(panel)), a.float_stride(), y);
            row += fits ? k.n_rows : 1;
        }
    }
}

} // namespace

bool covers_weight(const ggml_tensor * w) {
    if (w->ne[2] != 1 || w->ne[3] != 1 || w->nb[0] != ggml_type_size(w->type) || w->ne[0] % ggml_blck_size(w->type)) {
        return false;
    }
    const layout where = layout_of(w);
    switch (family_of(w->type)) {
        case family::none:   return false;
        case family::floats: return where == layout::plain;
        default:
            // the last rows that fill no tile are computed with rows before them
            return format_of(w->type, where, 1).kernel_of && w->ne[1] >= n_lanes
                && (where != layout::amx || w->ne[1] % (2*n_lanes) == 0);
    }
}

bool prefers_plain_rows(const ggml_tensor * w) {
    if (KNAPSPEC_SIMD == 128) {
        return false; // ours read the packing of upstream, whose kernels for prompts want it
    }
    return (w->type == GGML_TYPE_Q4_0 || w->type == GGML_TYPE_Q4_K || w->type == GGML_TYPE_IQ4_NL) && w->ne[2] == 1 && w->ne[3] == 1;
}

size_t mul_mat_work_size(const ggml_tensor * op) {
    return covers_product(op) ? activations(op, format_of(op)).bytes() : 0;
}

bool mul_mat(const ggml_compute_params * params, ggml_tensor * op) {
    if (!covers_product(op)) {
        return false;
    }
    const weight_format f = format_of(op);
    const activations a(op, f);
    if (params->wsize < a.bytes()) {
        return false;
    }
    const ggml_tensor * w = op->src[0];
    uint8_t * x = (uint8_t *) aligned((size_t) params->wdata);
    const int ith = params->ith, nth = params->nth;

    for (int c = 0; c < a.columns.n; c++) {
        if (a.kind != family::floats) {
            place_blocks(a, op, f, c, a.n_blocks*ith/nth, a.n_blocks*(ith + 1)/nth, x);
        } else if (c % nth == ith) {
            place_floats(a, op, c, x);
        }
    }

    const int64_t n_rows = w->ne[1], n_tiles = (n_rows + n_lanes - 1)/n_lanes;
    // a thread takes the next chunk when it is done: few where taking one costs as much as it, more where cores are uneven
    const int64_t chunk  = std::max<int64_t>(1, std::min(n_tiles/(nth*2), std::max<int64_t>(16, n_tiles/(nth*16))));
    if (ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, nth);
    }
    ggml_barrier(params->threadpool);

    const size_t tile_bytes = f.tile_bytes*a.n_blocks;
#ifdef KNAPSPEC_AMX
    std::optional<tile_shapes> shapes;
    if (f.dot_bytes) {
        shapes.emplace(a.columns.n, f.dot_bytes);
    }
#endif
    for (int64_t first = ith*chunk; first < n_tiles; first = chunk*ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int64_t end = std::min(first + chunk, n_tiles);
        if (a.kind == family::floats) {
            float_products(a, op, x, first*n_lanes, std::min(end*n_lanes, n_rows));
            continue;
        }
        for (int64_t t = first; t < end;) {
            const int64_t row = t*n_lanes, some = std::min<int64_t>(n_lanes, n_rows - row);
            // the last tile of plain rows may begin early, and then leaves out what the one before computed
            const int64_t skip = n_lanes - some, which = f.pairs ? t % 2 : 0;
            int at_once = std::min(f.kernel_of(a.columns.size(0)).n_tiles, f.kernel_of(a.columns.small).n_tiles);
            at_once = t + at_once <= end ? at_once : 1;
            for (int panel = 0; panel < a.columns.count; panel++) {
                const int       n = a.columns.size(panel);
                const int64_t   c = a.columns.first(panel);
                const uint8_t * u = x + a.panel_offset(panel);
                float y[most_tiles*amx_panel_columns*n_lanes];

                const kernel    k    = f.kernel_of(n);
                const uint8_t * tile = (const uint8_t *) w->data + (f.tile_bytes ? (t - which)*tile_bytes : (row - skip)*w->nb[1]);
                (at_once == 1 ? k.one : k.several)(tile, tile_bytes, f.pairs ? which : w->nb[1], a.n_blocks, u, y);
                for (int i = 0; i < at_once; i++) {
                    for (int j = 0; j < n; j++) {
                        memcpy(column_of(op, c + j) + row + i*n_lanes, y + (i*n + j)*n_lanes + skip, some*sizeof(float));
                    }
                }
            }
            t += at_once;
        }
    }
    return true;
}

#else

bool covers_weight(const ggml_tensor *) { return false; }
bool prefers_plain_rows(const ggml_tensor *) { return false; }
size_t mul_mat_work_size(const ggml_tensor *) { return 0; }
bool mul_mat(const ggml_compute_params *, ggml_tensor *) { return false; }

#endif

} // namespace knapspec
