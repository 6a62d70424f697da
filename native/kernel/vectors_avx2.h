// Vectors of float32 for AVX2, under the names that loops written once for all vectors use. See vectors.h.
#pragma once

#include "kernel/avx2.h"

typedef __m256 vec;
typedef __m256 vec_nans;        // all bits set in a lane that saw a NaN

#define VEC_NANS_NONE _mm256_setzero_ps()
#define vec_load load8_f32
#define vec_store store8_f32
#define vec_set1 _mm256_set1_ps
#define vec_add _mm256_add_ps
#define vec_sub _mm256_sub_ps
#define vec_mul _mm256_mul_ps
#define vec_min _mm256_min_ps
#define vec_max _mm256_max_ps
#define vec_load_f16 load8_f16
#define vec_load_bf16 load8_bf16

INLINE vec vec_rint(vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

INLINE vec_nans vec_nans_add(vec_nans nans, vec a, vec b)
{
    return _mm256_or_ps(nans, _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
}

INLINE int vec_nans_any(vec_nans nans) { return _mm256_movemask_ps(nans) != 0; }

INLINE void vec_store_two_f32(void *p, vec a, vec b)
{
    store8_f32(p, a);
    store8_f32((char *)p + 4 * LANES, b);
}

INLINE void vec_store_two_f16(void *p, vec a, vec b)
{
    store8_f16(p, a);
    store8_f16((char *)p + 2 * LANES, b);
}

INLINE void vec_store_two_bf16(void *p, vec a, vec b)
{
    const __m256i low = _mm256_srli_epi32(rounded_bf16(a), 16), high = _mm256_srli_epi32(rounded_bf16(b), 16);
    _mm256_storeu_si256(p, _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
}

INLINE vec vec_round_f32(vec x) { return x; }
INLINE vec vec_round_f16(vec x) { return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }

INLINE vec vec_round_bf16(vec x)
{
    return _mm256_castsi256_ps(_mm256_and_si256(rounded_bf16(x), _mm256_set1_epi32((int)0xffff0000)));
}

INLINE vec vec_abs(vec x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

#define vec_canonical canonical_nan8

INLINE void vec_stream(void *p, vec x) { _mm256_stream_ps(p, x); }
INLINE uint32_t vec_less(vec a, vec b) { return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }

// Bit i of `bits` at the top of lane i, with others below.
INLINE __m256i lane_bits(uint32_t bits)
{
    return _mm256_sllv_epi32(_mm256_set1_epi32((int)bits), _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24));
}

INLINE vec vec_negate(vec x, uint32_t bits)
{
    return _mm256_xor_ps(x, _mm256_and_ps(_mm256_castsi256_ps(lane_bits(bits)), _mm256_set1_ps(-0.0f)));
}

// 1 + u is put together of its bits, which x has from bit 7 on.
INLINE vec uniform_of(__m256i x)
{
    const __m256i bits = _mm256_and_si256(x, _mm256_set1_epi32(0x007fff80));
    return _mm256_sub_ps(_mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_set1_epi32(0x3f800040))), _mm256_set1_ps(1));
}

INLINE void vec_uniforms(struct codec_key key, uint32_t index, vec *u)
{
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for (int v = 0; v < 2; v++) {
        __m256i x = _mm256_xor_si256(lanes, _mm256_set1_epi32((int)key.a));     // lanes add nothing that the other has
        x = _mm256_xor_si256(x, _mm256_set1_epi32((int)(index / 2) + v * LANES));
        x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
        x = _mm256_mullo_epi32(x, _mm256_set1_epi32((int)CODEC_RANDOM_MULTIPLIER_1));
        x = _mm256_xor_si256(_mm256_xor_si256(x, _mm256_srli_epi32(x, 15)), _mm256_set1_epi32((int)key.b));
        x = _mm256_mullo_epi32(x, _mm256_set1_epi32((int)CODEC_RANDOM_MULTIPLIER_2));
        x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 15));
        u[v] = uniform_of(_mm256_slli_epi32(x, 7));
        u[v + 2] = uniform_of(_mm256_srli_epi32(x, 9));
    }
}

INLINE vec vec_with_sign(vec magnitude, vec x)
{
    return _mm256_or_ps(magnitude, _mm256_and_ps(x, _mm256_set1_ps(-0.0f)));
}

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

// packs works within each half of the register, so the words are sorted.
INLINE __m256i packed_i8(const __m256i *q)
{
    const __m256i low = _mm256_packs_epi32(q[0], q[1]), high = _mm256_packs_epi32(q[2], q[3]);
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

INLINE __m256i vec_to_i8(const vec *q)
{
    const __m256i whole[] = {_mm256_cvtps_epi32(q[0]), _mm256_cvtps_epi32(q[1]), _mm256_cvtps_epi32(q[2]),
                             _mm256_cvtps_epi32(q[3])};
    return packed_i8(whole);
}

INLINE __m256i vec_truncated_to_i8(const vec *q)
{
    const __m256i whole[] = {_mm256_cvttps_epi32(q[0]), _mm256_cvttps_epi32(q[1]), _mm256_cvttps_epi32(q[2]),
                             _mm256_cvttps_epi32(q[3])};
    return packed_i8(whole);
}

// The four as bytes: packs and packus saturate, which is the clamp.
INLINE __m256i packed_u8(const __m256i *q)
{
    const __m256i low = _mm256_packs_epi32(q[0], q[1]), high = _mm256_packs_epi32(q[2], q[3]);
    return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

INLINE __m256i vec_to_u8(const vec *q)
{
    const __m256i whole[] = {_mm256_cvtps_epi32(q[0]), _mm256_cvtps_epi32(q[1]), _mm256_cvtps_epi32(q[2]),
                             _mm256_cvtps_epi32(q[3])};
    return packed_u8(whole);
}

INLINE __m128i vec_load_bytes(const uint8_t *p) { return _mm_loadl_epi64((const __m128i *)p); }
INLINE vec vec_from_i8(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }
INLINE vec vec_from_u8(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)); }

typedef __m256d wide;

#define WIDE_ZERO _mm256_setzero_pd()
#define wide_add _mm256_add_pd
#define wide_add_square(sum, x) _mm256_add_pd(sum, _mm256_mul_pd(x, x))
#define wide_store _mm256_storeu_pd

INLINE wide wide_low(vec x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
INLINE wide wide_high(vec x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
