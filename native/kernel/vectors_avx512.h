// Vectors of float32 for AVX-512, under the names that loops written once for all vectors use. See vectors.h.
#pragma once

#include <immintrin.h>

#include "kernel/element.h"
#include "kernel/loops.h"

enum { LANES = 16 };
typedef __m512 vec;
typedef __mmask16 vec_nans;

#define VEC_NANS_NONE 0
#define vec_set1 _mm512_set1_ps
#define vec_add _mm512_add_ps
#define vec_sub _mm512_sub_ps
#define vec_mul _mm512_mul_ps
#define vec_min _mm512_min_ps
#define vec_max _mm512_max_ps

INLINE vec vec_load(const void *p) { return _mm512_loadu_ps(p); }
INLINE void vec_store(void *p, vec x) { _mm512_storeu_ps(p, x); }
INLINE vec vec_rint(vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vec_nans vec_nans_add(vec_nans nans, vec a, vec b) { return nans | _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
INLINE int vec_nans_any(vec_nans nans) { return nans != 0; }

INLINE void vec_store_two_f32(void *p, vec a, vec b)
{
    vec_store(p, a);
    vec_store((char *)p + 4 * LANES, b);
}

INLINE vec vec_round_f32(vec x) { return x; }
INLINE vec vec_load_f16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }

INLINE void vec_store_two_f16(void *p, vec a, vec b)
{
    _mm256_storeu_si256(p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
    _mm256_storeu_si256((void *)((char *)p + 2 * LANES), _mm512_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT));
}

INLINE vec vec_round_f16(vec x) { return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }

INLINE vec vec_load_bf16(const void *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}

// The upper half of each lane becomes x, which is finite, rounded to bfloat16.
INLINE __m512i rounded_bf16(vec x)
{
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits, _mm512_add_epi32(is_odd, _mm512_set1_epi32(0x7fff)));
}

INLINE void vec_store_two_bf16(void *p, vec a, vec b)
{
    _mm256_storeu_si256(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bf16(a), 16)));
    _mm256_storeu_si256((void *)((char *)p + 2 * LANES), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bf16(b), 16)));
}

INLINE vec vec_round_bf16(vec x)
{
    return _mm512_castsi512_ps(_mm512_and_si512(rounded_bf16(x), _mm512_set1_epi32((int)0xffff0000)));
}

#define vec_abs _mm512_abs_ps

INLINE vec vec_canonical(vec x)
{
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_ps((float)NAN));
}

INLINE void vec_stream(void *p, vec x) { _mm512_stream_ps(p, x); }
INLINE uint32_t vec_less(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
INLINE vec vec_negate(vec x, uint32_t bits) { return _mm512_mask_xor_ps(x, (__mmask16)bits, x, _mm512_set1_ps(-0.0f)); }

// By the table of truth that is given as bits.
#define AND_OR 0xea     // a & b | c
#define XOR_XOR 0x96    // a ^ b ^ c

// 1 + u is put together of its bits, which x has from bit 7 on.
INLINE vec uniform_of(__m512i x)
{
    x = _mm512_ternarylogic_epi32(x, _mm512_set1_epi32(0x007fff80), _mm512_set1_epi32(0x3f800040), AND_OR);
    return _mm512_sub_ps(_mm512_castsi512_ps(x), _mm512_set1_ps(1));
}

INLINE void vec_uniforms(struct codec_key key, uint32_t index, vec *u)
{
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i x = _mm512_xor_si512(lanes, _mm512_set1_epi32((int)key.a));     // lanes add nothing that index / 2 has
    x = _mm512_xor_si512(x, _mm512_set1_epi32((int)(index / 2)));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32((int)CODEC_RANDOM_MULTIPLIER_1));
    x = _mm512_ternarylogic_epi32(x, _mm512_srli_epi32(x, 15), _mm512_set1_epi32((int)key.b), XOR_XOR);
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32((int)CODEC_RANDOM_MULTIPLIER_2));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
    u[0] = uniform_of(_mm512_slli_epi32(x, 7));
    u[1] = uniform_of(_mm512_srli_epi32(x, 9));
}

INLINE vec vec_with_sign(vec magnitude, vec x)
{
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(INT32_MIN),
                                                         _mm512_castps_si512(magnitude), AND_OR));
}

#define vec_least _mm512_reduce_min_ps
#define vec_greatest _mm512_reduce_max_ps

INLINE __m256i joined(__m128i low, __m128i high)
{
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

INLINE __m256i vec_to_i8(const vec *q)
{
    return joined(_mm512_cvtepi32_epi8(_mm512_cvtps_epi32(q[0])), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(q[1])));
}

INLINE __m256i vec_truncated_to_i8(const vec *q)
{
    return joined(_mm512_cvtepi32_epi8(_mm512_cvttps_epi32(q[0])), _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(q[1])));
}

// The conversion to bytes saturates unsigned numbers: only the lower clamp is left to do.
INLINE __m128i clamped_u8(vec q)
{
    return _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(_mm512_max_ps(q, _mm512_setzero_ps())));
}

INLINE __m256i vec_to_u8(const vec *q) { return joined(clamped_u8(q[0]), clamped_u8(q[1])); }
INLINE __m128i vec_load_bytes(const uint8_t *p) { return _mm_loadu_si128((const __m128i *)p); }
INLINE vec vec_from_i8(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
INLINE vec vec_from_u8(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)); }

typedef __m512d wide;

#define WIDE_ZERO _mm512_setzero_pd()
#define wide_add _mm512_add_pd
#define wide_add_square(sum, x) _mm512_fmadd_pd(x, x, sum)
#define wide_store _mm512_storeu_pd

INLINE wide wide_low(vec x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
INLINE wide wide_high(vec x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }
