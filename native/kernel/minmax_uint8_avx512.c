// Codec minmax_uint8 for AVX-512: the vectors for minmax_uint8_vectors.h.
#include <float.h>
#include <immintrin.h>

#include "kernel/element.h"
#include "kernel/loops.h"
#include "kernel/minmax_uint8.h"
#include "kernel/variants.h"

#define ISA avx512

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

INLINE vec vec_load(const void *p)
{
    return _mm512_loadu_ps(p);
}

INLINE void vec_store(void *p, vec x)
{
    _mm512_storeu_ps(p, x);
}

INLINE vec vec_rint(vec x)
{
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

INLINE vec_nans vec_nans_add(vec_nans nans, vec a, vec b)
{
    return nans | _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
}

INLINE int vec_nans_any(vec_nans nans)
{
    return nans != 0;
}

// The conversion to bytes saturates unsigned numbers: only the lower clamp is left to do.
INLINE __m128i codes16(vec q)
{
    return _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(_mm512_max_ps(q, _mm512_setzero_ps())));
}

INLINE __m256i vec_codes(const vec *q)
{
    return _mm256_inserti128_si256(_mm256_castsi128_si256(codes16(q[0])), codes16(q[1]), 1);
}

INLINE vec vec_from_codes(const uint8_t *codes)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes)));
}

INLINE void vec_store_two_f32(void *p, vec a, vec b)
{
    vec_store(p, a);
    vec_store((char *)p + 4 * LANES, b);
}

INLINE vec vec_round_f32(vec x)
{
    return x;
}

INLINE vec vec_load_f16(const void *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256(p));
}

INLINE void vec_store_two_f16(void *p, vec a, vec b)
{
    _mm256_storeu_si256(p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
    _mm256_storeu_si256((void *)((char *)p + 2 * LANES), _mm512_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT));
}

INLINE vec vec_round_f16(vec x)
{
    return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

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

#include "kernel/minmax_uint8_vectors.h"

void minmax_uint8_kernels_init_avx512(struct kernel_table *table)
{
    minmax_uint8_vectors_init_avx512(table);
}
