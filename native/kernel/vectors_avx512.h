// The operations of vectors.h that have AVX-512 instructions.
#pragma once

#define vec_set1 _mm512_set1_ps
#define vec_min _mm512_min_ps
#define vec_max _mm512_max_ps
#define vec_least _mm512_reduce_min_ps
#define vec_greatest _mm512_reduce_max_ps
#define vec_sum _mm512_reduce_add_ps

INLINE vec vec_load(const void *p) { return _mm512_loadu_ps(p); }
INLINE void vec_store(void *p, vec x) { _mm512_storeu_ps(p, x); }
INLINE void vec_stream(void *p, vec x) { _mm512_stream_ps(p, x); }
INLINE vec vec_rint(vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

typedef __m256i halves;
#define halves_from_bytes _mm256_cvtepu8_epi16
#define halves_from_floats(x) _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)
#define vec_from_halves _mm512_cvtph_ps

INLINE halves load_halves(const void *p) { return _mm256_loadu_si256(p); }
INLINE void store_halves(void *p, halves h) { _mm256_storeu_si256(p, h); }
INLINE void stream_halves(void *p, halves h) { _mm256_stream_si256(p, h); }
INLINE whole whole_from_halves(halves h) { return (whole)_mm512_cvtepu16_epi32(h); }
INLINE halves halves_of(whole n) { return _mm512_cvtepi32_epi16((__m512i)n); }

INLINE void vec_store_two_bf16(void *p, vec a, vec b)
{
    store_halves(p, halves_of(rounded_bf16(a) >> 16));
    store_halves((char *)p + sizeof(halves), halves_of(rounded_bf16(b) >> 16));
}

typedef __mmask16 mask;

#define MASK_NONE 0
#define mask_bits(m) (m)

INLINE mask vec_greater(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
INLINE mask vec_unordered(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
INLINE vec vec_choose(mask m, vec a, vec b) { return _mm512_mask_blend_ps(m, a, b); }
INLINE vec vec_negate(vec x, uint32_t bits, int v)
{
    return _mm512_mask_xor_ps(x, (mask)(bits >> v * LANES), x, vec_set1(-0.0f));
}

INLINE whole vec_nearest(vec x) { return (whole)_mm512_cvtps_epi32(x); }
INLINE whole vec_truncated(vec x) { return (whole)_mm512_cvttps_epi32(x); }

INLINE whole whole_with_upper(whole a, whole b)
{
    return (whole)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)a, (__m512i)b);
}

INLINE __m256i joined(__m128i low, __m128i high)
{
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

INLINE __m256i bytes_signed(const whole *n)
{
    return joined(_mm512_cvtepi32_epi8((__m512i)n[0]), _mm512_cvtepi32_epi8((__m512i)n[1]));
}

#define bytes_unsigned bytes_signed

// The conversion to bytes saturates unsigned numbers, so only the lower clamp is needed.
INLINE __m128i clamped_u8(vec q) { return _mm512_cvtusepi32_epi8((__m512i)vec_nearest(vec_max(q, vec_set1(0)))); }
INLINE __m256i vec_to_u8(const vec *q) { return joined(clamped_u8(q[0]), clamped_u8(q[1])); }

INLINE __m128i vec_load_bytes(const uint8_t *p) { return _mm_loadu_si128((const __m128i *)p); }
INLINE vec vec_from_i8(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
INLINE vec vec_from_u8(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)); }

typedef __m512d wide;

#define wide_add_square(sum, x) _mm512_fmadd_pd(x, x, sum)
#define wide_store _mm512_storeu_pd

INLINE wide wide_low(vec x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
INLINE wide wide_high(vec x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }
