// One register of 32-bit lanes, one weight row per lane: what the product kernels need of it, for AVX-512 with VNNI, for AVX2
// with or without VNNI and for NEON with dot products. Without any, KNAPSPEC_SIMD is not defined and upstream computes
// everything.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)
#define KNAPSPEC_SIMD 512
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define KNAPSPEC_SIMD 256
#elif defined(__aarch64__) && defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#define KNAPSPEC_SIMD 128
#endif

#ifdef KNAPSPEC_SIMD

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(_MSC_VER) && !defined(__clang__)
#define KNAPSPEC_INLINE __forceinline
#define KNAPSPEC_UNROLL
#elif defined(__clang__)
#define KNAPSPEC_INLINE inline __attribute__((always_inline))
#define KNAPSPEC_UNROLL _Pragma("clang loop unroll(full)")
#else
#define KNAPSPEC_INLINE inline __attribute__((always_inline))
#define KNAPSPEC_UNROLL _Pragma("GCC unroll 16")
#endif

namespace knapspec {

KNAPSPEC_INLINE int32_t load_i32(const uint8_t * p) {
    int32_t v;
    memcpy(&v, p, 4);
    return v;
}

KNAPSPEC_INLINE float load_f32(const uint8_t * p) {
    float v;
    memcpy(&v, p, 4);
    return v;
}

} // namespace knapspec

#if KNAPSPEC_SIMD == 128
#include "knapspec-simd-neon.h"
#else
#include "knapspec-simd-x86.h"
#endif

#endif // KNAPSPEC_SIMD
