// Codecs topk and topk_2bit for AVX2: 32 elements are compared at once, and only those found are looked at one by one.
#include <immintrin.h>

#include "kernel/topk_2bit.h"
#include "kernel/variants.h"

// Magnitudes are positive as signed numbers, and least - 1 is -1 at least.

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

static uint32_t at_least_16(const char *block, uint64_t least)
{
    const __m256i below = _mm256_set1_epi16((short)((int)least - 1)), mask = _mm256_set1_epi16(0x7fff);
    const __m256i a = _mm256_and_si256(_mm256_loadu_si256((const void *)block), mask);
    const __m256i b = _mm256_and_si256(_mm256_loadu_si256((const void *)(block + 32)), mask);
    const __m256i found = _mm256_packs_epi16(_mm256_cmpgt_epi16(a, below), _mm256_cmpgt_epi16(b, below));
    // packs works within each half of the register.
    return (uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(found, 0xd8));
}

#define TOPK(element, size, bits, infinity, nan, at_least)                                                          \
    static const struct topk_element element = {size, bits, infinity, nan, topk_number_##element,                   \
                                                topk_rounded_##element, at_least};                                  \
    static void topk_encode_##element##_avx2(void *dst, const void *src, size_t count,                              \
                                             const struct bhvd_codec_options *options)                              \
    {                                                                                                               \
        topk_encode(dst, src, count, options->parameter, &element);                                                 \
    }                                                                                                               \
    static void topk_2bit_encode_##element##_avx2(void *dst, const void *src, size_t count,                         \
                                                  const struct bhvd_codec_options *options)                         \
    {                                                                                                               \
        topk_2bit_encode(dst, src, count, options->parameter, &element);                                            \
    }
TOPK(f32, 4, 31, 0x7f800000, 0x7fc00000, at_least_f32)
TOPK(f16, 2, 15, 0x7c00, 0x7e00, at_least_16)
TOPK(bf16, 2, 15, 0x7f80, 0x7fc0, at_least_16)
TOPK(f64, 8, 63, 0x7ff0000000000000, 0x7ff8000000000000, at_least_f64)

void topk_kernels_init_avx2(struct kernel_table *table)
{
    struct kernel_codec *dtypes = table->codecs[BHVD_CODEC_TOPK];
    dtypes[BHVD_FLOAT32].encode = topk_encode_f32_avx2;
    dtypes[BHVD_FLOAT16].encode = topk_encode_f16_avx2;
    dtypes[BHVD_BFLOAT16].encode = topk_encode_bf16_avx2;
    dtypes[BHVD_FLOAT64].encode = topk_encode_f64_avx2;
    dtypes = table->codecs[BHVD_CODEC_TOPK_2BIT];
    dtypes[BHVD_FLOAT32].encode = topk_2bit_encode_f32_avx2;
    dtypes[BHVD_FLOAT16].encode = topk_2bit_encode_f16_avx2;
    dtypes[BHVD_BFLOAT16].encode = topk_2bit_encode_bf16_avx2;
    dtypes[BHVD_FLOAT64].encode = topk_2bit_encode_f64_avx2;
}
