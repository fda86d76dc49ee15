// The x86 side of knapspec-simd.h: AVX-512 with VNNI, AVX2 with or without VNNI.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns of its own intrinsics, which begin with registers that are undefined on purpose
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

namespace knapspec {

KNAPSPEC_INLINE void prefetch_near(const void * p) { _mm_prefetch((const char *) p, _MM_HINT_T0); }
KNAPSPEC_INLINE void prefetch_far (const void * p) { _mm_prefetch((const char *) p, _MM_HINT_T1); }

KNAPSPEC_INLINE __m128i load_128(const void * p) { return _mm_loadu_si128((const __m128i *) p); }

KNAPSPEC_INLINE uint64_t load_u16(const uint8_t * p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return h;
}

#if KNAPSPEC_SIMD == 512

constexpr int n_lanes = 16, n_registers = 32;
using vint   = __m512i;
using vfloat = __m512;

// products of unsigned and signed bytes may be summed four at a time without saturation
constexpr bool wide_dot = true;

KNAPSPEC_INLINE vint   load_i   (const void * p)            { return _mm512_loadu_si512(p); }
KNAPSPEC_INLINE void   store_i  (void * p, vint a)          { _mm512_storeu_si512(p, a); }
KNAPSPEC_INLINE vint   add_i    (vint a, vint b)            { return _mm512_add_epi32(a, b); }
KNAPSPEC_INLINE vint   set_i    (int v)                     { return _mm512_set1_epi32(v); }
KNAPSPEC_INLINE vint   set_bytes(int v)                     { return _mm512_set1_epi8((char) v); }
KNAPSPEC_INLINE vint   bit_and  (vint a, vint b)            { return _mm512_and_si512(a, b); }
KNAPSPEC_INLINE vint   bit_or   (vint a, vint b)            { return _mm512_or_si512(a, b); }
KNAPSPEC_INLINE vint   bit_xor  (vint a, vint b)            { return _mm512_xor_si512(a, b); }
template <int n> KNAPSPEC_INLINE vint shift_right(vint a)   { return _mm512_srli_epi32(a, n); }
template <int n> KNAPSPEC_INLINE vint shift_left (vint a)   { return _mm512_slli_epi32(a, n); }
template <int n> KNAPSPEC_INLINE vint shift_right_signed(vint a) { return _mm512_srai_epi32(a, n); }
KNAPSPEC_INLINE vint   unpack_low_32(vint a, vint b)         { return _mm512_unpacklo_epi32(a, b); }
KNAPSPEC_INLINE vint   unpack_high_32(vint a, vint b)        { return _mm512_unpackhi_epi32(a, b); }
KNAPSPEC_INLINE vint   unpack_low_64(vint a, vint b)         { return _mm512_unpacklo_epi64(a, b); }
KNAPSPEC_INLINE vint   unpack_high_64(vint a, vint b)        { return _mm512_unpackhi_epi64(a, b); }
KNAPSPEC_INLINE vint   dot_16   (vint s, vint a, vint b)    { return _mm512_dpwssd_epi32(s, a, b); }
KNAPSPEC_INLINE vfloat set_f    (float v)                   { return _mm512_set1_ps(v); }
KNAPSPEC_INLINE vfloat to_float (vint a)                    { return _mm512_cvtepi32_ps(a); }
KNAPSPEC_INLINE vfloat mul      (vfloat a, vfloat b)        { return _mm512_mul_ps(a, b); }
KNAPSPEC_INLINE vfloat fma      (vfloat a, vfloat b, vfloat c) { return _mm512_fmadd_ps(a, b, c); }
KNAPSPEC_INLINE vfloat fnma     (vfloat a, vfloat b, vfloat c) { return _mm512_fnmadd_ps(a, b, c); }
KNAPSPEC_INLINE void   store_f  (float * p, vfloat a)       { _mm512_storeu_ps(p, a); }
KNAPSPEC_INLINE vfloat load_f   (const float * p)           { return _mm512_loadu_ps(p); }
KNAPSPEC_INLINE vfloat load_half(const void * p)            { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p)); }
KNAPSPEC_INLINE vfloat load_bf16(const void * p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *) p)), 16));
}
KNAPSPEC_INLINE float  sum_lanes(vfloat a)                  { return _mm512_reduce_add_ps(a); }
// one byte per row
KNAPSPEC_INLINE vint   widen_u8 (const void * p)            { return _mm512_cvtepu8_epi32(load_128(p)); }
KNAPSPEC_INLINE vint   widen_i8 (const void * p)            { return _mm512_cvtepi8_epi32(load_128(p)); }
// two bytes per row, to 16 bits each
KNAPSPEC_INLINE vint   widen_pairs_u8(const void * p)       { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *) p)); }
KNAPSPEC_INLINE vfloat half_to_float(vint a)                { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)); } // low halves

// s + the dot product of n dwords per row with the same n dwords of one column
template <int n, int largest> KNAPSPEC_INLINE vint dot_group(vint s, const vint * u, const uint8_t * x) {
    KNAPSPEC_UNROLL for (int q = 0; q < n; q++) {
        s = _mm512_dpbusd_epi32(s, u[q], _mm512_set1_epi32(load_i32(x + 4*q)));
    }
    return s;
}

KNAPSPEC_INLINE vint shuffle_bytes(vint a, vint b)          { return _mm512_shuffle_epi8(a, b); } // within 16 bytes
KNAPSPEC_INLINE vint repeat_16    (const void * p)          { return _mm512_broadcast_i32x4(load_128(p)); }
// u with 16 added to every byte of which `bits` has a bit in common with `mask`
KNAPSPEC_INLINE vint add_16_where(vint u, vint bits, vint mask) {
    return _mm512_mask_add_epi8(u, _mm512_test_epi8_mask(bits, mask), u, _mm512_set1_epi8(16));
}

#else // 256

constexpr int n_lanes = 8, n_registers = 16;
using vint   = __m256i;
using vfloat = __m256;

KNAPSPEC_INLINE vint   load_i   (const void * p)            { return _mm256_loadu_si256((const __m256i *) p); }
KNAPSPEC_INLINE vint   set_i    (int v)                     { return _mm256_set1_epi32(v); }
KNAPSPEC_INLINE vint   set_bytes(int v)                     { return _mm256_set1_epi8((char) v); }
KNAPSPEC_INLINE vint   bit_and  (vint a, vint b)            { return _mm256_and_si256(a, b); }
KNAPSPEC_INLINE vint   bit_or   (vint a, vint b)            { return _mm256_or_si256(a, b); }
KNAPSPEC_INLINE vint   bit_xor  (vint a, vint b)            { return _mm256_xor_si256(a, b); }
template <int n> KNAPSPEC_INLINE vint shift_right(vint a)   { return _mm256_srli_epi32(a, n); }
template <int n> KNAPSPEC_INLINE vint shift_left (vint a)   { return _mm256_slli_epi32(a, n); }
template <int n> KNAPSPEC_INLINE vint shift_right_signed(vint a) { return _mm256_srai_epi32(a, n); }
KNAPSPEC_INLINE vint   unpack_low_32(vint a, vint b)         { return _mm256_unpacklo_epi32(a, b); }
KNAPSPEC_INLINE vint   unpack_high_32(vint a, vint b)        { return _mm256_unpackhi_epi32(a, b); }
KNAPSPEC_INLINE vint   unpack_low_64(vint a, vint b)         { return _mm256_unpacklo_epi64(a, b); }
KNAPSPEC_INLINE vint   unpack_high_64(vint a, vint b)        { return _mm256_unpackhi_epi64(a, b); }
KNAPSPEC_INLINE vint   dot_16   (vint s, vint a, vint b)    { return _mm256_add_epi32(s, _mm256_madd_epi16(a, b)); }
KNAPSPEC_INLINE vfloat set_f    (float v)                   { return _mm256_set1_ps(v); }
KNAPSPEC_INLINE vfloat to_float (vint a)                    { return _mm256_cvtepi32_ps(a); }
KNAPSPEC_INLINE vfloat mul      (vfloat a, vfloat b)        { return _mm256_mul_ps(a, b); }
KNAPSPEC_INLINE vfloat fma      (vfloat a, vfloat b, vfloat c) { return _mm256_fmadd_ps(a, b, c); }
KNAPSPEC_INLINE vfloat fnma     (vfloat a, vfloat b, vfloat c) { return _mm256_fnmadd_ps(a, b, c); }
KNAPSPEC_INLINE void   store_f  (float * p, vfloat a)       { _mm256_storeu_ps(p, a); }
KNAPSPEC_INLINE vfloat load_f   (const float * p)           { return _mm256_loadu_ps(p); }
KNAPSPEC_INLINE vfloat load_half(const void * p)            { return _mm256_cvtph_ps(load_128(p)); }
KNAPSPEC_INLINE vfloat load_bf16(const void * p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16));
}
KNAPSPEC_INLINE float  sum_lanes(vfloat a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
KNAPSPEC_INLINE vint   widen_u8 (const void * p)            { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) p)); }
KNAPSPEC_INLINE vint   widen_i8 (const void * p)            { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) p)); }
KNAPSPEC_INLINE vint   widen_pairs_u8(const void * p)       { return _mm256_cvtepu8_epi16(load_128(p)); }
KNAPSPEC_INLINE vfloat half_to_float(vint a) {
    const __m256i low = _mm256_and_si256(a, _mm256_set1_epi32(0xffff));
    return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
}

KNAPSPEC_INLINE vint shuffle_bytes(vint a, vint b)          { return _mm256_shuffle_epi8(a, b); }
KNAPSPEC_INLINE vint repeat_16    (const void * p)          { return _mm256_broadcastsi128_si256(load_128(p)); }
KNAPSPEC_INLINE vint add_16_where(vint u, vint bits, vint mask) {
    const vint none = _mm256_cmpeq_epi8(_mm256_and_si256(bits, mask), _mm256_setzero_si256());
    return _mm256_add_epi8(u, _mm256_andnot_si256(none, _mm256_set1_epi8(16)));
}

#if (defined(__AVX512VNNI__) && defined(__AVX512VL__)) || defined(__AVXVNNI__)
constexpr bool wide_dot = true;

template <int n, int largest> KNAPSPEC_INLINE vint dot_group(vint s, const vint * u, const uint8_t * x) {
    KNAPSPEC_UNROLL for (int q = 0; q < n; q++) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
        s = _mm256_dpbusd_epi32(s, u[q], _mm256_set1_epi32(load_i32(x + 4*q)));
#else
        s = _mm256_dpbusd_avx_epi32(s, u[q], _mm256_set1_epi32(load_i32(x + 4*q)));
#endif
    }
    return s;
}
#else
constexpr bool wide_dot = false;

// u holds bytes up to `largest`: as many 16-bit sums are added as cannot overflow. Bytes that may exceed 127 come as
// signed ones: `largest` 128 stands for them.
template <int n, int largest> KNAPSPEC_INLINE vint dot_group(vint s, const vint * u, const uint8_t * x) {
    const vint ones = _mm256_set1_epi16(1);
    constexpr int run = largest == 15 ? 8 : largest <= 31 ? 4 : largest <= 63 ? 2 : 1;
    static_assert(n % run == 0, "a run would read beyond the weights");
    static_assert(run*2*largest*127 <= 32767 || largest == 128, "sums of 16 bits overflow");
    KNAPSPEC_UNROLL for (int q = 0; q < n; q += run) {
        vint t = _mm256_setzero_si256();
        KNAPSPEC_UNROLL for (int j = 0; j < run; j++) {
            const vint c = _mm256_set1_epi32(load_i32(x + 4*(q + j))), w = u[q + j];
            const vint m = largest == 128 ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(c, w))
                                          : _mm256_maddubs_epi16(w, c);
            t = j == 0 ? m : _mm256_add_epi16(t, m);
        }
        s = _mm256_add_epi32(s, _mm256_madd_epi16(t, ones));
    }
    return s;
}
#endif

#endif // 256

// As many consecutive rows of a plain matrix as there are lanes, at one place within each. Every fourth row has a pointer
// of its own: with two strides all rows are then one addressing mode away.
struct rows {
    const uint8_t * p[n_lanes/4];
    size_t          stride;
    size_t          stride_3;

    KNAPSPEC_INLINE rows(const uint8_t * first, size_t stride) : stride(stride), stride_3(3*stride) {
        KNAPSPEC_UNROLL for (int i = 0; i < n_lanes/4; i++) {
            p[i] = first + 4*i*stride;
        }
    }

    KNAPSPEC_INLINE const uint8_t * at(int i, int j, int offset) const {
        return p[i] + offset + (j == 0 ? 0 : j == 1 ? stride : j == 2 ? 2*stride : stride_3);
    }

    KNAPSPEC_INLINE void advance(int n) {
        KNAPSPEC_UNROLL for (int i = 0; i < n_lanes/4; i++) {
            p[i] += n;
        }
    }

    // Otherwise compilers make one pointer per row of it and spill them.
    KNAPSPEC_INLINE void pin() {
#if defined(__GNUC__)
        KNAPSPEC_UNROLL for (int i = 0; i < n_lanes/4; i++) {
            __asm__ volatile("" : "+r"(p[i]));
        }
        __asm__ volatile("" : "+r"(stride), "+r"(stride_3));
#endif
    }

    KNAPSPEC_INLINE __m128i u16_of_4(int i, int offset) const {
        return _mm_cvtsi64_si128((long long) (load_u16(at(i, 0, offset)) | load_u16(at(i, 1, offset)) << 16 |
            load_u16(at(i, 2, offset)) << 32 | load_u16(at(i, 3, offset)) << 48));
    }

    KNAPSPEC_INLINE vfloat half(int offset) const {
        const __m128i lo = _mm_unpacklo_epi64(u16_of_4(0, offset), u16_of_4(1, offset));
#if KNAPSPEC_SIMD == 512
        const __m128i hi = _mm_unpacklo_epi64(u16_of_4(2, offset), u16_of_4(3, offset));
        return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(lo), hi, 1));
#else
        return _mm256_cvtph_ps(lo);
#endif
    }

    // out[k]: dword k of the 16 bytes at offset
    KNAPSPEC_INLINE void bytes_16(int offset, vint * out) const {
        vint v[4];
        KNAPSPEC_UNROLL for (int j = 0; j < 4; j++) {
            const __m256i lo = _mm256_inserti128_si256(_mm256_castsi128_si256(load_128(at(0, j, offset))), load_128(at(1, j, offset)), 1);
#if KNAPSPEC_SIMD == 512
            const __m256i hi = _mm256_inserti128_si256(_mm256_castsi128_si256(load_128(at(2, j, offset))), load_128(at(3, j, offset)), 1);
            v[j] = _mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1);
#else
            v[j] = lo;
#endif
        }
        const vint a = unpack_low_32(v[0], v[1]), b = unpack_high_32(v[0], v[1]);
        const vint c = unpack_low_32(v[2], v[3]), d = unpack_high_32(v[2], v[3]);
        out[0] = unpack_low_64 (a, c);
        out[1] = unpack_high_64(a, c);
        out[2] = unpack_low_64 (b, d);
        out[3] = unpack_high_64(b, d);
    }
};

} // namespace knapspec
