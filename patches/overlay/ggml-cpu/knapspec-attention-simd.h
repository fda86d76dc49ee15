// F32 vectors of the widest kind this build of the CPU backend may use, and what attention needs besides arithmetic: F16
// loads and the transposition of keys. KNAPSPEC_LANES is left undefined where there is none.
#pragma once

#include "ggml-impl.h"
#include "vec.h"

#include <stdint.h>

#if defined(__GNUC__) || defined(__clang__)
#define KNAPSPEC_INLINE inline __attribute__((always_inline))
#define KNAPSPEC_NOINLINE __attribute__((noinline))
#if defined(__clang__)
#define KNAPSPEC_UNROLL _Pragma("unroll")
#else
#define KNAPSPEC_UNROLL _Pragma("GCC unroll 8")
#endif
#define KNAPSPEC_PREFETCH(p) __builtin_prefetch((p), 0, 2)
#else
#define KNAPSPEC_INLINE __forceinline
#define KNAPSPEC_NOINLINE __declspec(noinline)
#define KNAPSPEC_UNROLL
#define KNAPSPEC_PREFETCH(p) _mm_prefetch((const char *) (p), _MM_HINT_T1)
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include <immintrin.h>

#define KNAPSPEC_LANES 16
// vectors of a register block beside its rows
#define KNAPSPEC_BLOCK 4

using vf = __m512;

static KNAPSPEC_INLINE vf v_zero()                       { return _mm512_setzero_ps(); }
static KNAPSPEC_INLINE vf v_set(float x)                 { return _mm512_set1_ps(x); }
static KNAPSPEC_INLINE vf v_load(const float * p)        { return _mm512_loadu_ps(p); }
static KNAPSPEC_INLINE vf v_load(const ggml_fp16_t * p)  { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p)); }
static KNAPSPEC_INLINE vf v_load(const int8_t * p)       { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) p))); }
static KNAPSPEC_INLINE void v_store(float * p, vf a)     { _mm512_storeu_ps(p, a); }
static KNAPSPEC_INLINE vf v_add(vf a, vf b)              { return _mm512_add_ps(a, b); }
static KNAPSPEC_INLINE vf v_sub(vf a, vf b)              { return _mm512_sub_ps(a, b); }
static KNAPSPEC_INLINE vf v_mul(vf a, vf b)              { return _mm512_mul_ps(a, b); }
static KNAPSPEC_INLINE vf v_div(vf a, vf b)              { return _mm512_div_ps(a, b); }
static KNAPSPEC_INLINE vf v_fma(vf a, vf b, vf c)        { return _mm512_fmadd_ps(a, b, c); }
static KNAPSPEC_INLINE vf v_abs(vf a)                    { return _mm512_abs_ps(a); }
// the larger; b where one of them is not a number
static KNAPSPEC_INLINE vf v_max(vf a, vf b)              { return _mm512_max_ps(a, b); }
static KNAPSPEC_INLINE float v_reduce_max(vf a)          { return _mm512_reduce_max_ps(a); }
static KNAPSPEC_INLINE float v_reduce_add(vf a)          { return _mm512_reduce_add_ps(a); }
// x < y ? a : b
static KNAPSPEC_INLINE vf v_select_less(vf x, vf y, vf a, vf b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), b, a);
}
// x == y ? a : b
static KNAPSPEC_INLINE vf v_select_equal(vf x, vf y, vf a, vf b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_EQ_OQ), b, a);
}
static KNAPSPEC_INLINE vf v_copysign(vf magnitude, vf sign) {
    return _mm512_or_ps(magnitude, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f)));
}

// 16 bytes of each of 16 rows, turned: word[i] holds bytes 4i..4i+3 of every row
static KNAPSPEC_INLINE void v_turn(const char * p, size_t stride, __m512i word[4]) {
    __m512i r[4];
    KNAPSPEC_UNROLL
    for (int i = 0; i < 4; i++) {
        __m512i t = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *) (p + i*stride)));
        t = _mm512_mask_broadcast_i32x4(t, 0x00F0, _mm_loadu_si128((const __m128i *) (p + (i +  4)*stride)));
        t = _mm512_mask_broadcast_i32x4(t, 0x0F00, _mm_loadu_si128((const __m128i *) (p + (i +  8)*stride)));
        t = _mm512_mask_broadcast_i32x4(t, 0xF000, _mm_loadu_si128((const __m128i *) (p + (i + 12)*stride)));
        r[i] = t;
    }
    const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
    const __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
    word[0] = _mm512_unpacklo_epi64(a, c);
    word[1] = _mm512_unpackhi_epi64(a, c);
    word[2] = _mm512_unpacklo_epi64(b, d);
    word[3] = _mm512_unpackhi_epi64(b, d);
}

// d..d+7 of 32 keys from `key`, to out[d][keys]
static KNAPSPEC_INLINE void v_turn_f16(const char * key, size_t stride, ggml_fp16_t * out, int keys) {
    __m512i even[4], odd[4];
    v_turn(key,          2*stride, even);
    v_turn(key + stride, 2*stride, odd);
    KNAPSPEC_UNROLL
    for (int i = 0; i < 4; i++) {
        const __m512i lo = _mm512_mask_blend_epi16(0xAAAAAAAA, even[i], _mm512_slli_epi32(odd[i], 16));
        const __m512i hi = _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(even[i], 16), odd[i]);
        _mm512_storeu_si512(out + (2*i + 0)*keys, lo);
        _mm512_storeu_si512(out + (2*i + 1)*keys, hi);
    }
}

// d..d+15 of 16 keys of whole numbers from `key`, times one factor per key, to out[d][keys]
static KNAPSPEC_INLINE void v_turn_i8(const char * key, size_t stride, vf factor, float * out, int keys) {
    __m512i word[4];
    v_turn(key, stride, word);
    KNAPSPEC_UNROLL
    for (int i = 0; i < 4; i++) {
        const __m512i w = word[i];
        v_store(out + (4*i + 0)*keys, _mm512_mul_ps(factor, _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(w, 24), 24))));
        v_store(out + (4*i + 1)*keys, _mm512_mul_ps(factor, _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(w, 16), 24))));
        v_store(out + (4*i + 2)*keys, _mm512_mul_ps(factor, _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(w,  8), 24))));
        v_store(out + (4*i + 3)*keys, _mm512_mul_ps(factor, _mm512_cvtepi32_ps(_mm512_srai_epi32(w, 24))));
    }
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

#define KNAPSPEC_LANES 8
#define KNAPSPEC_BLOCK 2

using vf = __m256;

static KNAPSPEC_INLINE vf v_zero()                       { return _mm256_setzero_ps(); }
static KNAPSPEC_INLINE vf v_set(float x)                 { return _mm256_set1_ps(x); }
static KNAPSPEC_INLINE vf v_load(const float * p)        { return _mm256_loadu_ps(p); }
static KNAPSPEC_INLINE vf v_load(const ggml_fp16_t * p)  { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p)); }
static KNAPSPEC_INLINE vf v_load(const int8_t * p)       { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) p))); }
static KNAPSPEC_INLINE void v_store(float * p, vf a)     { _mm256_storeu_ps(p, a); }
static KNAPSPEC_INLINE vf v_add(vf a, vf b)              { return _mm256_add_ps(a, b); }
static KNAPSPEC_INLINE vf v_sub(vf a, vf b)              { return _mm256_sub_ps(a, b); }
static KNAPSPEC_INLINE vf v_mul(vf a, vf b)              { return _mm256_mul_ps(a, b); }
static KNAPSPEC_INLINE vf v_div(vf a, vf b)              { return _mm256_div_ps(a, b); }
static KNAPSPEC_INLINE vf v_fma(vf a, vf b, vf c)        { return _mm256_fmadd_ps(a, b, c); }
static KNAPSPEC_INLINE vf v_abs(vf a)                    { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static KNAPSPEC_INLINE vf v_max(vf a, vf b)              { return _mm256_max_ps(a, b); }
static KNAPSPEC_INLINE float v_reduce_max(vf a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
static KNAPSPEC_INLINE float v_reduce_add(vf a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
static KNAPSPEC_INLINE vf v_select_less(vf x, vf y, vf a, vf b) {
    return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_LT_OQ));
}
static KNAPSPEC_INLINE vf v_select_equal(vf x, vf y, vf a, vf b) {
    return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_EQ_OQ));
}
static KNAPSPEC_INLINE vf v_copysign(vf magnitude, vf sign) {
    return _mm256_or_ps(magnitude, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
}

static KNAPSPEC_INLINE void v_turn(const char * p, size_t stride, __m256i word[4]) {
    __m256i r[4];
    KNAPSPEC_UNROLL
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *) (p + i*stride))),
                                       _mm_loadu_si128((const __m128i *) (p + (i + 4)*stride)), 1);
    }
    const __m256i a = _mm256_unpacklo_epi32(r[0], r[1]), b = _mm256_unpackhi_epi32(r[0], r[1]);
    const __m256i c = _mm256_unpacklo_epi32(r[2], r[3]), d = _mm256_unpackhi_epi32(r[2], r[3]);
    word[0] = _mm256_unpacklo_epi64(a, c);
    word[1] = _mm256_unpackhi_epi64(a, c);
    word[2] = _mm256_unpacklo_epi64(b, d);
    word[3] = _mm256_unpackhi_epi64(b, d);
}

// of 16 keys
static KNAPSPEC_INLINE void v_turn_f16(const char * key, size_t stride, ggml_fp16_t * out, int keys) {
    __m256i even[4], odd[4];
    v_turn(key,          2*stride, even);
    v_turn(key + stride, 2*stride, odd);
    KNAPSPEC_UNROLL
    for (int i = 0; i < 4; i++) {
        const __m256i lo = _mm256_blend_epi16(even[i], _mm256_slli_epi32(odd[i], 16), 0xAA);
        const __m256i hi = _mm256_blend_epi16(_mm256_srli_epi32(even[i], 16), odd[i], 0xAA);
        _mm256_storeu_si256((__m256i *) (out + (2*i + 0)*keys), lo);
        _mm256_storeu_si256((__m256i *) (out + (2*i + 1)*keys), hi);
    }
}

// of 8 keys
static KNAPSPEC_INLINE void v_turn_i8(const char * key, size_t stride, vf factor, float * out, int keys) {
    __m256i word[4];
    v_turn(key, stride, word);
    KNAPSPEC_UNROLL
    for (int i = 0; i < 4; i++) {
        const __m256i w = word[i];
        v_store(out + (4*i + 0)*keys, _mm256_mul_ps(factor, _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(w, 24), 24))));
        v_store(out + (4*i + 1)*keys, _mm256_mul_ps(factor, _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(w, 16), 24))));
        v_store(out + (4*i + 2)*keys, _mm256_mul_ps(factor, _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(w,  8), 24))));
        v_store(out + (4*i + 3)*keys, _mm256_mul_ps(factor, _mm256_cvtepi32_ps(_mm256_srai_epi32(w, 24))));
    }
}

#elif defined(__ARM_NEON) && defined(__aarch64__) && !defined(__ARM_FEATURE_SVE)

#include <arm_neon.h>

#define KNAPSPEC_LANES 4
#define KNAPSPEC_BLOCK 4

using vf = float32x4_t;

static KNAPSPEC_INLINE vf v_zero()                       { return vdupq_n_f32(0.0f); }
static KNAPSPEC_INLINE vf v_set(float x)                 { return vdupq_n_f32(x); }
static KNAPSPEC_INLINE vf v_load(const float * p)        { return vld1q_f32(p); }
static KNAPSPEC_INLINE vf v_load(const ggml_fp16_t * p)  { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
static KNAPSPEC_INLINE vf v_load(const int8_t * p) {
    int32_t four;
    memcpy(&four, p, 4);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
}
static KNAPSPEC_INLINE void v_store(float * p, vf a)     { vst1q_f32(p, a); }
static KNAPSPEC_INLINE vf v_add(vf a, vf b)              { return vaddq_f32(a, b); }
static KNAPSPEC_INLINE vf v_sub(vf a, vf b)              { return vsubq_f32(a, b); }
static KNAPSPEC_INLINE vf v_mul(vf a, vf b)              { return vmulq_f32(a, b); }
static KNAPSPEC_INLINE vf v_div(vf a, vf b)              { return vdivq_f32(a, b); }
static KNAPSPEC_INLINE vf v_fma(vf a, vf b, vf c)        { return vfmaq_f32(c, a, b); }
static KNAPSPEC_INLINE vf v_abs(vf a)                    { return vabsq_f32(a); }
static KNAPSPEC_INLINE vf v_max(vf a, vf b)              { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static KNAPSPEC_INLINE float v_reduce_max(vf a)          { return vmaxnmvq_f32(a); }
static KNAPSPEC_INLINE float v_reduce_add(vf a)          { return vaddvq_f32(a); }
static KNAPSPEC_INLINE vf v_select_less(vf x, vf y, vf a, vf b)  { return vbslq_f32(vcltq_f32(x, y), a, b); }
static KNAPSPEC_INLINE vf v_select_equal(vf x, vf y, vf a, vf b) { return vbslq_f32(vceqq_f32(x, y), a, b); }
static KNAPSPEC_INLINE vf v_copysign(vf magnitude, vf sign) {
    return vbslq_f32(vdupq_n_u32(0x80000000u), sign, magnitude);
}

// of 8 keys
static KNAPSPEC_INLINE void v_turn_f16(const char * key, size_t stride, ggml_fp16_t * out, int keys) {
    uint16x8_t r[8];
    KNAPSPEC_UNROLL
    for (int i = 0; i < 8; i++) {
        r[i] = vld1q_u16((const uint16_t *) (key + i*stride));
    }
    uint32x4_t a[8];
    KNAPSPEC_UNROLL
    for (int i = 0; i < 4; i++) { // pairs of keys
        a[2*i + 0] = vreinterpretq_u32_u16(vtrn1q_u16(r[2*i], r[2*i + 1])); // d 0, 2, 4, 6
        a[2*i + 1] = vreinterpretq_u32_u16(vtrn2q_u16(r[2*i], r[2*i + 1])); // d 1, 3, 5, 7
    }
    KNAPSPEC_UNROLL
    for (int odd = 0; odd < 2; odd++) {
        const uint64x2_t d04_lo = vreinterpretq_u64_u32(vtrn1q_u32(a[0 + odd], a[2 + odd]));
        const uint64x2_t d26_lo = vreinterpretq_u64_u32(vtrn2q_u32(a[0 + odd], a[2 + odd]));
        const uint64x2_t d04_hi = vreinterpretq_u64_u32(vtrn1q_u32(a[4 + odd], a[6 + odd]));
        const uint64x2_t d26_hi = vreinterpretq_u64_u32(vtrn2q_u32(a[4 + odd], a[6 + odd]));
        vst1q_u16(out + (0 + odd)*keys, vreinterpretq_u16_u64(vtrn1q_u64(d04_lo, d04_hi)));
        vst1q_u16(out + (2 + odd)*keys, vreinterpretq_u16_u64(vtrn1q_u64(d26_lo, d26_hi)));
        vst1q_u16(out + (4 + odd)*keys, vreinterpretq_u16_u64(vtrn2q_u64(d04_lo, d04_hi)));
        vst1q_u16(out + (6 + odd)*keys, vreinterpretq_u16_u64(vtrn2q_u64(d26_lo, d26_hi)));
    }
}

// of 4 keys
static KNAPSPEC_INLINE void v_turn_i8(const char * key, size_t stride, vf factor, float * out, int keys) {
    uint32x4_t r[4];
    KNAPSPEC_UNROLL
    for (int i = 0; i < 4; i++) {
        r[i] = vreinterpretq_u32_s8(vld1q_s8((const int8_t *) (key + i*stride)));
    }
    const uint64x2_t lo01 = vreinterpretq_u64_u32(vtrn1q_u32(r[0], r[1])), hi01 = vreinterpretq_u64_u32(vtrn2q_u32(r[0], r[1]));
    const uint64x2_t lo23 = vreinterpretq_u64_u32(vtrn1q_u32(r[2], r[3])), hi23 = vreinterpretq_u64_u32(vtrn2q_u32(r[2], r[3]));
    const int32x4_t word[4] = {
        vreinterpretq_s32_u64(vtrn1q_u64(lo01, lo23)), vreinterpretq_s32_u64(vtrn1q_u64(hi01, hi23)),
        vreinterpretq_s32_u64(vtrn2q_u64(lo01, lo23)), vreinterpretq_s32_u64(vtrn2q_u64(hi01, hi23)),
    };
    KNAPSPEC_UNROLL
    for (int i = 0; i < 4; i++) {
        const int32x4_t w = word[i];
        v_store(out + (4*i + 0)*keys, vmulq_f32(factor, vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(w, 24), 24))));
        v_store(out + (4*i + 1)*keys, vmulq_f32(factor, vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(w, 16), 24))));
        v_store(out + (4*i + 2)*keys, vmulq_f32(factor, vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(w,  8), 24))));
        v_store(out + (4*i + 3)*keys, vmulq_f32(factor, vcvtq_f32_s32(vshrq_n_s32(w, 24))));
    }
}

#endif
