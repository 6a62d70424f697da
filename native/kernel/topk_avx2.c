// Codecs topk and topk_2bit for AVX2: 32 elements are compared at once, and only matches are handled one by one.
#include <immintrin.h>

#include "kernel/topk_2bit.h"
#include "kernel/variants.h"

// Magnitudes are positive as signed numbers, and least - 1 is at least -1.

static uint32_t at_least_f32(const char *block, uint64_t least)
{
    const __m256i below = _mm256_set1_epi32((int)least - 1), mask = _mm256_set1_epi32(0x7fffffff);
    uint32_t found = 0;
    for (int v = 0; v < 4; v++) {
        const __m256i x = _mm256_and_si256(_mm256_loadu_si256((const void *)(block + 32 * v)), mask);
        const __m256i is_found = _mm256_cmpgt_epi32(x, below);
        found |= (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(is_found)) << 8 * v;
    }
    return found;
}

static uint32_t at_least_f64(const char *block, uint64_t least)
{
    const __m256i below = _mm256_set1_epi64x((long long)least - 1), mask = _mm256_set1_epi64x(INT64_MAX);
    uint32_t found = 0;
    for (int v = 0; v < 8; v++) {
        const __m256i x = _mm256_and_si256(_mm256_loadu_si256((const void *)(block + 32 * v)), mask);
        const __m256i is_found = _mm256_cmpgt_epi64(x, below);
        found |= (uint32_t)_mm256_movemask_pd(_mm256_castsi256_pd(is_found)) << 4 * v;
    }
    return found;
}

static uint32_t at_least_f16(const char *block, uint64_t least)
{
    const __m256i below = _mm256_set1_epi16((short)((int)least - 1)), mask = _mm256_set1_epi16(0x7fff);
    const __m256i a = _mm256_and_si256(_mm256_loadu_si256((const void *)block), mask);
    const __m256i b = _mm256_and_si256(_mm256_loadu_si256((const void *)(block + 32)), mask);
    const __m256i found = _mm256_packs_epi16(_mm256_cmpgt_epi16(a, below), _mm256_cmpgt_epi16(b, below));
    // packs works within each half of the register.
    return (uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(found, 0xd8));
}

static uint32_t at_least_bf16(const char *block, uint64_t least) { return at_least_f16(block, least); }

#define AT_LEAST(element) at_least_##element
TOPK_EACH_TYPE(TOPK_ENCODERS)

#define TOPK_SET(dtype, element, table)                                                         \
    table->codecs[BHVD_CODEC_TOPK][dtype].encode = NAME(topk_encode_##element);                 \
    table->codecs[BHVD_CODEC_TOPK_2BIT][dtype].encode = NAME(topk_2bit_encode_##element);
void topk_kernels_init_avx2(struct kernel_table *table) { EACH_FLOAT_TYPE(TOPK_SET, table) }
