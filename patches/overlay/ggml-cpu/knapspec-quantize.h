// Activations as bytes, with the rounding of upstream's quantize_row_q8_0, _q8_1 and _q8_K, written straight to where a kernel
// reads them. Upstream's blocks, read again just after they were written, cost more than the quantisation itself.
#pragma once

#if defined(__AVX2__) && defined(__F16C__)
#define KNAPSPEC_QUANTIZE

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace knapspec {

// 32 floats as bytes in their order, beyond the range of a byte at its ends
inline __m256i pack_bytes(const __m256i * v) {
    const __m256i p = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    return _mm256_permutevar8x32_epi32(p, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

inline float round_to_half(float v) {
    return _cvtsh_ss(_cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT));
}

inline float largest_lane(__m256 v) {
    __m128 m = _mm_max_ps(_mm256_extractf128_ps(v, 1), _mm256_castps256_ps128(v));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

// dwords of v: sums of four signed bytes
inline __m256i sums_of_4(__m256i bytes) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

inline int32_t sum_of_8(__m256i v) {
    __m128i t = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    t = _mm_add_epi32(t, _mm_unpackhi_epi64(t, t));
    return _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 1)));
}

struct block_of_32 {
    float   d;   // rounded to 16 bits
    float   s;   // scale times sum, rounded to 16 bits
    int32_t sum; // of the bytes
};

// The bytes of x[0..31] to `out`, each with the bits of `flip` turned over.
inline block_of_32 quantize_32(const float * x, int flip, uint8_t * out) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 v[4], largest = _mm256_andnot_ps(sign, _mm256_loadu_ps(x));
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_loadu_ps(x + 8*i);
        largest = i == 0 ? largest : _mm256_max_ps(largest, _mm256_andnot_ps(sign, v[i]));
    }
    const float  most  = largest_lane(largest);
    const float  d     = most/127.f;
    const __m256 scale = _mm256_set1_ps(most != 0.0f ? 127.f/most : 0.0f);
    __m256i q[4];
    for (int i = 0; i < 4; i++) {
        q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], scale)); // to the nearest, as the processor is set
    }
    const __m256i bytes = pack_bytes(q);
    _mm256_storeu_si256((__m256i *) out, _mm256_xor_si256(bytes, _mm256_set1_epi8((char) flip)));

    // the two differ where x is no number
    const int32_t before = sum_of_8(_mm256_add_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3])));
    return { round_to_half(d), round_to_half(d*(float) before), sum_of_8(sums_of_4(bytes)) };
}

// The bytes of x[0..255] to `out` and the sums of each 16 of them to `sums`. Returns the scale.
inline float quantize_256(const float * x, uint8_t * out, int16_t * sums) {
    __m256 high[4], low[4];
    for (int i = 0; i < 4; i++) {
        high[i] = low[i] = _mm256_setzero_ps();
    }
    for (int i = 0; i < 32; i++) { // the second operand wins over what is no number
        const __m256 v = _mm256_loadu_ps(x + 8*i);
        high[i % 4] = _mm256_max_ps(v, high[i % 4]);
        low [i % 4] = _mm256_min_ps(v, low [i % 4]);
    }
    const float most  = largest_lane(_mm256_max_ps(_mm256_max_ps(high[0], high[1]), _mm256_max_ps(high[2], high[3])));
    const __m256 less = _mm256_min_ps(_mm256_min_ps(low[0], low[1]), _mm256_min_ps(low[2], low[3]));
    const float least = -largest_lane(_mm256_sub_ps(_mm256_setzero_ps(), less));
    if (most == 0.0f && least == 0.0f) {
        memset(out, 0, 256);
        memset(sums, 0, 16*sizeof(int16_t));
        return 0.0f;
    }
    float extreme = most > -least ? most : least;
    if (most == -least) { // the first of the two
        int i = 0;
        while (x[i] != most && x[i] != least) {
            i++;
        }
        extreme = x[i];
    }
    const float  inverse = -127.f/extreme;
    const __m256 scale   = _mm256_set1_ps(inverse);
    for (int i = 0; i < 8; i += 4) {
        __m256i four[4];
        for (int j = 0; j < 4; j++) {
            __m256i q[4];
            for (int k = 0; k < 4; k++) {
                const __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + 32*(i + j) + 8*k), scale);
                // what is no number is rounded to 0
                q[k] = _mm256_cvtps_epi32(_mm256_and_ps(v, _mm256_cmp_ps(v, v, _CMP_ORD_Q)));
            }
            const __m256i bytes = pack_bytes(q);
            _mm256_storeu_si256((__m256i *) (out + 32*(i + j)), bytes);
            four[j] = sums_of_4(bytes);
        }
        // per half: sums of the four registers' 16 bytes
        const __m256i sixteen = _mm256_hadd_epi32(_mm256_hadd_epi32(four[0], four[1]), _mm256_hadd_epi32(four[2], four[3]));
        const __m128i even = _mm256_castsi256_si128(sixteen), odd = _mm256_extracti128_si256(sixteen, 1);
        _mm_storeu_si128((__m128i *) (sums + 2*i), _mm_packs_epi32(_mm_unpacklo_epi32(even, odd), _mm_unpackhi_epi32(even, odd)));
    }
    return 1/inverse;
}

} // namespace knapspec

#endif
