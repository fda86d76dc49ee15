// The ARM side of knapspec-simd.h: NEON with dot products.
#pragma once

#include <arm_neon.h>

namespace knapspec {

#if defined(__GNUC__)
KNAPSPEC_INLINE void prefetch_near(const void * p) { __builtin_prefetch(p, 0, 3); }
KNAPSPEC_INLINE void prefetch_far (const void * p) { __builtin_prefetch(p, 0, 2); }
#else
KNAPSPEC_INLINE void prefetch_near(const void * p) { __prefetch(p); }
KNAPSPEC_INLINE void prefetch_far (const void * p) { __prefetch(p); }
#endif

constexpr int n_lanes = 4, n_registers = 32;
using vint   = int32x4_t;
using vfloat = float32x4_t;

// both factors of a dot product are signed bytes here
constexpr bool wide_dot = false;

KNAPSPEC_INLINE uint8x16_t as_u8 (vint a)                   { return vreinterpretq_u8_s32(a); }
KNAPSPEC_INLINE int8x16_t  as_i8 (vint a)                   { return vreinterpretq_s8_s32(a); }
KNAPSPEC_INLINE int16x8_t  as_i16(vint a)                   { return vreinterpretq_s16_s32(a); }
KNAPSPEC_INLINE int64x2_t  as_i64(vint a)                   { return vreinterpretq_s64_s32(a); }
KNAPSPEC_INLINE uint32x4_t as_u32(vint a)                   { return vreinterpretq_u32_s32(a); }

KNAPSPEC_INLINE vint   load_i   (const void * p)            { return vreinterpretq_s32_u8(vld1q_u8((const uint8_t *) p)); }
KNAPSPEC_INLINE vint   set_i    (int v)                     { return vdupq_n_s32(v); }
KNAPSPEC_INLINE vint   set_bytes(int v)                     { return vreinterpretq_s32_u8(vdupq_n_u8((uint8_t) v)); }
KNAPSPEC_INLINE vint   bit_and  (vint a, vint b)            { return vandq_s32(a, b); }
KNAPSPEC_INLINE vint   bit_or   (vint a, vint b)            { return vorrq_s32(a, b); }
KNAPSPEC_INLINE vint   bit_xor  (vint a, vint b)            { return veorq_s32(a, b); }
template <int n> KNAPSPEC_INLINE vint shift_right(vint a)   { return vreinterpretq_s32_u32(vshrq_n_u32(as_u32(a), n)); }
template <int n> KNAPSPEC_INLINE vint shift_left (vint a)   { return vshlq_n_s32(a, n); }
template <int n> KNAPSPEC_INLINE vint shift_right_signed(vint a) { return vshrq_n_s32(a, n); }
KNAPSPEC_INLINE vint   dot_16   (vint s, vint a, vint b) {
    const vint lo = vmull_s16(vget_low_s16(as_i16(a)), vget_low_s16(as_i16(b)));
    return vaddq_s32(s, vpaddq_s32(lo, vmull_high_s16(as_i16(a), as_i16(b))));
}
KNAPSPEC_INLINE vfloat set_f    (float v)                   { return vdupq_n_f32(v); }
KNAPSPEC_INLINE vfloat to_float (vint a)                    { return vcvtq_f32_s32(a); }
KNAPSPEC_INLINE vfloat mul      (vfloat a, vfloat b)        { return vmulq_f32(a, b); }
KNAPSPEC_INLINE vfloat fma      (vfloat a, vfloat b, vfloat c) { return vfmaq_f32(c, a, b); }
KNAPSPEC_INLINE vfloat fnma     (vfloat a, vfloat b, vfloat c) { return vfmsq_f32(c, a, b); }
KNAPSPEC_INLINE void   store_f  (float * p, vfloat a)       { vst1q_f32(p, a); }
KNAPSPEC_INLINE vfloat load_f   (const float * p)           { return vld1q_f32(p); }
KNAPSPEC_INLINE vfloat load_half(const void * p)            { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8((const uint8_t *) p))); }
KNAPSPEC_INLINE vfloat load_bf16(const void * p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8((const uint8_t *) p)), 16));
}
KNAPSPEC_INLINE float  sum_lanes(vfloat a)                  { return vaddvq_f32(a); }
KNAPSPEC_INLINE vfloat half_to_float(vint a)                { return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(as_u32(a)))); } // low halves

// one byte per row
KNAPSPEC_INLINE vint   widen_u8 (uint32_t bytes)            { return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bytes))))); }
KNAPSPEC_INLINE vint   widen_i8 (uint32_t bytes)            { return vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(bytes)))); }

// s + the dot product of n dwords per row with the same n dwords of one column; weights above 127 do not occur
template <int n, int largest> KNAPSPEC_INLINE vint dot_group(vint s, const vint * u, const uint8_t * x) {
    KNAPSPEC_UNROLL for (int q = 0; q < n; q += 4) {
        const int8x16_t c = vld1q_s8((const int8_t *) x + 4*q);
        s = vdotq_laneq_s32(s, as_i8(u[q]),     c, 0);
        s = vdotq_laneq_s32(s, as_i8(u[q + 1]), c, 1);
        s = vdotq_laneq_s32(s, as_i8(u[q + 2]), c, 2);
        s = vdotq_laneq_s32(s, as_i8(u[q + 3]), c, 3);
    }
    return s;
}

KNAPSPEC_INLINE vint shuffle_bytes(vint a, vint b)          { return vreinterpretq_s32_u8(vqtbl1q_u8(as_u8(a), as_u8(b))); }
KNAPSPEC_INLINE vint repeat_16    (const void * p)          { return load_i(p); }
// u with 16 added to every byte of which `bits` has a bit in common with `mask`
KNAPSPEC_INLINE vint add_16_where(vint u, vint bits, vint mask) {
    return vreinterpretq_s32_u8(vaddq_u8(as_u8(u), vandq_u8(vtstq_u8(as_u8(bits), as_u8(mask)), vdupq_n_u8(16))));
}

// Four consecutive rows of a plain matrix, at one place within each.
struct rows {
    const uint8_t * p[n_lanes];

    KNAPSPEC_INLINE rows(const uint8_t * first, size_t stride) {
        KNAPSPEC_UNROLL for (int i = 0; i < n_lanes; i++) {
            p[i] = first + i*stride;
        }
    }

    KNAPSPEC_INLINE void advance(int n) {
        KNAPSPEC_UNROLL for (int i = 0; i < n_lanes; i++) {
            p[i] += n;
        }
    }

    KNAPSPEC_INLINE void pin() {} // as many pointers as rows are what compilers make of it anyway

    KNAPSPEC_INLINE vfloat half(int offset) const {
        uint16_t h[n_lanes];
        KNAPSPEC_UNROLL for (int i = 0; i < n_lanes; i++) {
            memcpy(h + i, p[i] + offset, 2);
        }
        return load_half(h);
    }

    // out[k]: dword k of the 16 bytes at offset
    KNAPSPEC_INLINE void bytes_16(int offset, vint * out) const {
        vint v[n_lanes];
        KNAPSPEC_UNROLL for (int i = 0; i < n_lanes; i++) {
            v[i] = load_i(p[i] + offset);
        }
        const int64x2_t a = as_i64(vzip1q_s32(v[0], v[1])), b = as_i64(vzip2q_s32(v[0], v[1]));
        const int64x2_t c = as_i64(vzip1q_s32(v[2], v[3])), d = as_i64(vzip2q_s32(v[2], v[3]));
        out[0] = vreinterpretq_s32_s64(vzip1q_s64(a, c));
        out[1] = vreinterpretq_s32_s64(vzip2q_s64(a, c));
        out[2] = vreinterpretq_s32_s64(vzip1q_s64(b, d));
        out[3] = vreinterpretq_s32_s64(vzip2q_s64(b, d));
    }
};

} // namespace knapspec
