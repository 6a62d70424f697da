// Codec minmax_uint8 for AVX2: the vectors for minmax_uint8_vectors.h; float64 by the compiler's vectors.
#include <float.h>

#include "kernel/avx2.h"
#include "kernel/minmax_uint8.h"
#include "kernel/variants.h"

#define ISA avx2
#define ELEMENT f64
#define REAL double
#define REAL_MAX DBL_MAX
#define SIZE 8
#include "kernel/minmax_uint8_loops.h"

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

INLINE vec vec_rint(vec x)
{
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

INLINE vec_nans vec_nans_add(vec_nans nans, vec a, vec b)
{
    return _mm256_or_ps(nans, _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
}

INLINE int vec_nans_any(vec_nans nans)
{
    return _mm256_movemask_ps(nans) != 0;
}

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

INLINE vec vec_round_f32(vec x)
{
    return x;
}

INLINE vec vec_round_f16(vec x)
{
    return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

INLINE vec vec_round_bf16(vec x)
{
    return _mm256_castsi256_ps(_mm256_and_si256(rounded_bf16(x), _mm256_set1_epi32((int)0xffff0000)));
}

#include "kernel/minmax_uint8_vectors.h"

void minmax_uint8_kernels_init_avx2(struct kernel_table *table)
{
    minmax_uint8_vectors_init_avx2(table);
    CODEC_FILL(BHVD_FLOAT64, f64);
}
