// Codec minmax_uint8 for AVX2: the vectors for minmax_uint8_vectors.h; float64 by the compiler's vectors.
#include <float.h>

#include "kernel/minmax_uint8.h"
#include "kernel/variants.h"
#include "kernel/vectors_avx2.h"

#define ELEMENT f64
#define REAL double
#define REAL_MAX DBL_MAX
#define SIZE 8
#include "kernel/minmax_uint8_loops.h"

// packs and packus saturate, which is the clamp; they work within each half of the register, so the words are sorted.
INLINE __m256i vec_codes(const vec *q)
{
    const __m256i low = _mm256_packs_epi32(_mm256_cvtps_epi32(q[0]), _mm256_cvtps_epi32(q[1]));
    const __m256i high = _mm256_packs_epi32(_mm256_cvtps_epi32(q[2]), _mm256_cvtps_epi32(q[3]));
    return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

INLINE vec vec_from_codes(const uint8_t *codes)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes)));
}

#include "kernel/minmax_uint8_vectors.h"

void minmax_uint8_kernels_init_avx2(struct kernel_table *table)
{
    minmax_uint8_vectors_init_avx2(table);
    kernel_codec_set(&table->codecs[BHVD_CODEC_MINMAX_UINT8][BHVD_FLOAT64], minmax_uint8_encode_f64_avx2,
                     minmax_uint8_decode_f64_avx2, minmax_uint8_decode_add_f64_avx2);
}
