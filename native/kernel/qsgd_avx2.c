// Codec qsgd for AVX2.
#include <float.h>

#include "kernel/qsgd.h"
#include "kernel/variants.h"
#include "kernel/vectors_avx2.h"

// packs works within each half of the register, so the words are sorted.
INLINE __m256i vec_bytes(const vec *q)
{
    const __m256i low = _mm256_packs_epi32(_mm256_cvtps_epi32(q[0]), _mm256_cvtps_epi32(q[1]));
    const __m256i high = _mm256_packs_epi32(_mm256_cvtps_epi32(q[2]), _mm256_cvtps_epi32(q[3]));
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

INLINE vec vec_from_bytes(const uint8_t *bytes)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)bytes)));
}

#include "kernel/qsgd_vectors.h"
