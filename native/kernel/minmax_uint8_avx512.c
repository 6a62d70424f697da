// Codec minmax_uint8 for AVX-512: the vectors for minmax_uint8_vectors.h.
#include <float.h>

#include "kernel/minmax_uint8.h"
#include "kernel/variants.h"
#include "kernel/vectors_avx512.h"

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

#include "kernel/minmax_uint8_vectors.h"

void minmax_uint8_kernels_init_avx512(struct kernel_table *table)
{
    minmax_uint8_vectors_init_avx512(table);
}
