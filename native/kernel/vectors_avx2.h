// The operations of vectors.h that have AVX2 instructions.
#pragma once

#define vec_set1 _mm256_set1_ps
#define vec_min _mm256_min_ps
#define vec_max _mm256_max_ps

INLINE vec vec_load(const void *p) { return _mm256_loadu_ps(p); }
INLINE void vec_store(void *p, vec x) { _mm256_storeu_ps(p, x); }
INLINE void vec_stream(void *p, vec x) { _mm256_stream_ps(p, x); }
INLINE vec vec_rint(vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

INLINE float vec_least(vec x)
{
    __m128 y = _mm_min_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_min_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_min_ss(y, _mm_movehdup_ps(y)));
}

INLINE float vec_greatest(vec x)
{
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

INLINE float vec_sum(vec x)
{
    __m128 y = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
    y += _mm_movehl_ps(y, y);
    return y[0] + y[1];
}

typedef __m128i halves;
#define halves_from_bytes _mm_cvtepu8_epi16
#define halves_from_floats(x) _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)
#define vec_from_halves _mm256_cvtph_ps

INLINE halves load_halves(const void *p) { return _mm_loadu_si128(p); }
INLINE void store_halves(void *p, halves h) { _mm_storeu_si128(p, h); }
INLINE void stream_halves(void *p, halves h) { _mm_stream_si128(p, h); }
INLINE whole whole_from_halves(halves h) { return (whole)_mm256_cvtepu16_epi32(h); }

// packus works within each half of the register; lanes 0 and 2 then hold the eight results.
INLINE halves halves_of(whole n)
{
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)n, (__m256i)n), 0x08));
}

// packs and packus work within each half of the register, so their results are permuted afterwards.
INLINE void vec_store_two_bf16(void *p, vec a, vec b)
{
    const __m256i packed = _mm256_packus_epi32((__m256i)(rounded_bf16(a) >> 16), (__m256i)(rounded_bf16(b) >> 16));
    _mm256_storeu_si256(p, _mm256_permute4x64_epi64(packed, 0xd8));
}

typedef __m256i mask;

#define MASK_NONE _mm256_setzero_si256()

INLINE uint32_t mask_bits(mask m) { return (uint32_t)_mm256_movemask_ps((vec)m); }
INLINE mask vec_greater(vec a, vec b) { return (mask)_mm256_cmp_ps(a, b, _CMP_GT_OQ); }
INLINE mask vec_unordered(vec a, vec b) { return (mask)_mm256_cmp_ps(a, b, _CMP_UNORD_Q); }
INLINE vec vec_choose(mask m, vec a, vec b) { return _mm256_blendv_ps(a, b, (vec)m); }

INLINE vec vec_negate(vec x, uint32_t bits, int v)
{
    const whole to_top = (whole){31, 30, 29, 28, 27, 26, 25, 24} - (uint32_t)(v * LANES);
    return (vec)((whole)x ^ (bits << to_top & 0x80000000));
}

INLINE whole vec_nearest(vec x) { return (whole)_mm256_cvtps_epi32(x); }
INLINE whole vec_truncated(vec x) { return (whole)_mm256_cvttps_epi32(x); }

INLINE whole whole_with_upper(whole a, whole b) { return (whole)_mm256_blend_epi16((__m256i)a, (__m256i)b, 0xaa); }

INLINE __m256i words_signed(whole a, whole b) { return _mm256_packs_epi32((__m256i)a, (__m256i)b); }
INLINE __m256i sorted(__m256i x) { return _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)); }

INLINE __m256i bytes_signed(const whole *n)
{
    return sorted(_mm256_packs_epi16(words_signed(n[0], n[1]), words_signed(n[2], n[3])));
}

INLINE __m256i bytes_unsigned(const whole *n)
{
    return sorted(_mm256_packus_epi16(words_signed(n[0], n[1]), words_signed(n[2], n[3])));
}

// packs and packus saturate, which is the clamp.
INLINE __m256i vec_to_u8(const vec *q)
{
    const whole n[] = {vec_nearest(q[0]), vec_nearest(q[1]), vec_nearest(q[2]), vec_nearest(q[3])};
    return bytes_unsigned(n);
}

INLINE __m128i vec_load_bytes(const uint8_t *p) { return _mm_loadl_epi64((const __m128i *)p); }
INLINE vec vec_from_i8(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }
INLINE vec vec_from_u8(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)); }

typedef __m256d wide;

#define wide_add_square(sum, x) _mm256_add_pd(sum, _mm256_mul_pd(x, x))
#define wide_store _mm256_storeu_pd

INLINE wide wide_low(vec x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
INLINE wide wide_high(vec x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
