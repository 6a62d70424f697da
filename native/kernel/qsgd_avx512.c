// Codec qsgd for AVX-512.
#include <float.h>

#include "kernel/qsgd.h"
#include "kernel/variants.h"
#include "kernel/vectors_avx512.h"

INLINE __m256i vec_bytes(const vec *q)
{
    const __m128i low = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(q[0]));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(q[1])), 1);
}

INLINE vec vec_from_bytes(const uint8_t *bytes)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)bytes)));
}

#include "kernel/qsgd_vectors.h"
