// Products of bytes on AMX tiles: the rows of A are columns of activations, a tile of B holds dword k of 16 weight rows in row k,
// and C receives their sums of 32 bits. Sums of integers are exact, so whether tiles compute them or registers makes no difference.
#pragma once

#include "knapspec-simd.h"

#if defined(__AMX_INT8__) && defined(KNAPSPEC_SIMD) && KNAPSPEC_SIMD == 512
#define KNAPSPEC_AMX

namespace knapspec {

// tile registers: which products are under way at once
constexpr int tile_a = 0, tile_b = 2, tile_c = 4;

// The instructions take the registers' numbers as text. GCC's own macros do not tell the compiler which memory is read.
#if defined(__GNUC__)
template <int t> KNAPSPEC_INLINE void tile_zero() { __asm__ volatile("tilezero %%tmm%c0" : : "i"(t)); }
template <int t> KNAPSPEC_INLINE void tile_load(const void * p, long stride) {
    __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(t), "r"(p), "r"(stride) : "memory");
}
template <int t> KNAPSPEC_INLINE void tile_store(void * p) {
    __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(t), "r"(p), "r"(64L) : "memory");
}
// c += a (signed) * b (signed)
template <int c, int a, int b> KNAPSPEC_INLINE void tile_dot() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}
KNAPSPEC_INLINE void tile_load_config (const void * p) { __asm__ volatile("ldtilecfg %0" : : "m"(*(const char (*)[64]) p)); }
KNAPSPEC_INLINE void tile_store_config(void * p)       { __asm__ volatile("sttilecfg %0" : "=m"(*(char (*)[64]) p)); }
#else
template <int t> KNAPSPEC_INLINE void tile_zero()                           { _tile_zero(t); }
template <int t> KNAPSPEC_INLINE void tile_load(const void * p, long stride) { _tile_loadd(t, p, stride); }
template <int t> KNAPSPEC_INLINE void tile_store(void * p)                  { _tile_stored(t, p, 64); }
template <int c, int a, int b> KNAPSPEC_INLINE void tile_dot()              { _tile_dpbssd(c, a, b); }
KNAPSPEC_INLINE void tile_load_config (const void * p) { _tile_loadconfig(p); }
KNAPSPEC_INLINE void tile_store_config(void * p)       { _tile_storeconfig(p); }
#endif

// What tile_a holds times the weights at b, to `sums`, in registers of pair i
template <int i> KNAPSPEC_INLINE void tile_product(const void * b, void * sums) {
    tile_load<tile_b + i>(b, 64);
    tile_zero<tile_c + i>();
    tile_dot<tile_c + i, tile_a, tile_b + i>();
    tile_store<tile_c + i>(sums);
}

// The shape of the tiles of this thread while it lives. Upstream configures a thread once and relies on it: what was there
// comes back.
class tile_shapes {
  public:
    tile_shapes(int n_columns, int n_bytes) {
        struct {
            uint8_t  palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t  rows[16] = {};
        } config;
        static_assert(sizeof(config) == 64, "the instruction reads 64 bytes");
        for (int i = 0; i < 2; i++) {
            config.rows[tile_a + i] = (uint8_t) n_columns;   config.row_bytes[tile_a + i] = (uint16_t) n_bytes;
            config.rows[tile_b + i] = (uint8_t) (n_bytes/4); config.row_bytes[tile_b + i] = 64;
            config.rows[tile_c + i] = (uint8_t) n_columns;   config.row_bytes[tile_c + i] = 64;
        }
        tile_store_config(before);
        tile_load_config(&config);
    }
    ~tile_shapes() { tile_load_config(before); }
    tile_shapes(const tile_shapes &) = delete;
    tile_shapes & operator=(const tile_shapes &) = delete;

  private:
    alignas(64) char before[64];
};

} // namespace knapspec

#endif
