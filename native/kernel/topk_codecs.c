// Codecs topk and topk_2bit: encoding with an at_least that looks at one element after the other; decoding.
#include "kernel/topk.h"

#include "kernel/definitions.h"
#include "kernel/topk_2bit.h"

#define TOPK(element, size, bits, infinity, nan)                                                                    \
    static uint32_t at_least_##element(const char *block, uint64_t least);                                          \
    static const struct topk_element element = {size, bits, infinity, nan, topk_number_##element,                   \
                                                topk_rounded_##element, at_least_##element};                        \
    static uint32_t at_least_##element(const char *block, uint64_t least)                                           \
    {                                                                                                               \
        return topk_at_least_few(block, TOPK_BLOCK, least, &element);                                               \
    }                                                                                                               \
    static void topk_encode_##element##_scalar(void *dst, const void *src, size_t count,                            \
                                               const struct bhvd_codec_options *options)                            \
    {                                                                                                               \
        topk_encode(dst, src, count, options->parameter, &element);                                                 \
    }                                                                                                               \
    static void topk_decode_##element##_scalar(void *dst, const void *src, size_t count,                            \
                                               const struct bhvd_codec_options *options)                            \
    {                                                                                                               \
        const size_t k = topk_count(options->parameter, count);                                                     \
        const char *indices = (const char *)src + CODEC_HEADER, *values = indices + 4 * k;                          \
        if (count > 0)                                                                                              \
            memset(dst, 0, count * size);                                                                           \
        for (size_t j = 0; j < k; j++) {                                                                            \
            uint32_t index;                                                                                         \
            memcpy(&index, indices + 4 * j, sizeof index);                                                          \
            if (index < count)                                                                                      \
                memcpy((char *)dst + (size_t)index * size, values + j * size, size);                                \
        }                                                                                                           \
    }                                                                                                               \
    static void topk_decode_add_##element##_scalar(float *dst, const void *src, size_t count,                       \
                                                   const struct bhvd_codec_options *options)                        \
    {                                                                                                               \
        const size_t k = topk_count(options->parameter, count);                                                     \
        const char *indices = (const char *)src + CODEC_HEADER, *values = indices + 4 * k;                          \
        for (size_t j = 0; j < k; j++) {                                                                            \
            uint32_t index;                                                                                         \
            memcpy(&index, indices + 4 * j, sizeof index);                                                          \
            if (index < count) {                                                                                    \
                char *sum = (char *)dst + 4 * (size_t)index;                                                        \
                store_f32(sum, (float)(load_f32(sum) + load_##element(values + j * size)));                         \
            }                                                                                                       \
        }                                                                                                           \
    }
TOPK(f32, 4, 31, 0x7f800000, 0x7fc00000)
TOPK(f16, 2, 15, 0x7c00, 0x7e00)
TOPK(bf16, 2, 15, 0x7f80, 0x7fc0)
TOPK(f64, 8, 63, 0x7ff0000000000000, 0x7ff8000000000000)

#define TOPK_2BIT(element, size)                                                                                    \
    static void topk_2bit_encode_##element##_scalar(void *dst, const void *src, size_t count,                       \
                                                    const struct bhvd_codec_options *options)                       \
    {                                                                                                               \
        topk_2bit_encode(dst, src, count, options->parameter, &element);                                            \
    }                                                                                                               \
    static void topk_2bit_decode_##element##_scalar(void *dst, const void *src, size_t count,                       \
                                                    const struct bhvd_codec_options *options)                       \
    {                                                                                                               \
        struct topk_2bit_reader reader = topk_2bit_reader(src, count, options->parameter);                          \
        size_t index;                                                                                               \
        uint64_t x;                                                                                                 \
        if (count > 0)                                                                                              \
            memset(dst, 0, count * size);                                                                           \
        while (topk_2bit_next(&reader, &element, &index, &x))                                                       \
            if (index < count)                                                                                      \
                memcpy((char *)dst + index * size, &x, size);                                                       \
    }                                                                                                               \
    static void topk_2bit_decode_add_##element##_scalar(float *dst, const void *src, size_t count,                  \
                                                        const struct bhvd_codec_options *options)                   \
    {                                                                                                               \
        struct topk_2bit_reader reader = topk_2bit_reader(src, count, options->parameter);                          \
        size_t index;                                                                                               \
        uint64_t x;                                                                                                 \
        while (topk_2bit_next(&reader, &element, &index, &x))                                                       \
            if (index < count) {                                                                                    \
                char *sum = (char *)dst + 4 * index;                                                                \
                store_f32(sum, (float)(load_f32(sum) + load_##element(&x)));                                        \
            }                                                                                                       \
    }
TOPK_2BIT(f32, 4)
TOPK_2BIT(f16, 2)
TOPK_2BIT(bf16, 2)
TOPK_2BIT(f64, 8)

static size_t topk_2bit_encoded_size(bhvd_dtype dtype, size_t count, const struct bhvd_codec_options *options)
{
    const struct topk_2bit_layout of = topk_2bit_layout(options->parameter, count);
    (void)dtype;
    return of.k == 0 && count > 0 ? 0 : of.size;
}

static size_t topk_encoded_size(bhvd_dtype dtype, size_t count, const struct bhvd_codec_options *options)
{
    const size_t k = topk_count(options->parameter, count);
    return k == 0 && count > 0 ? 0 : CODEC_HEADER + k * (sizeof(uint32_t) + bhvd_dtype_size(dtype));
}

void topk_kernels_init(struct kernel_table *table)
{
    CODEC_DEFINITIONS(table, BHVD_CODEC_TOPK, TOPK_VERSION, topk_encoded_size, topk, topk);
    CODEC_DEFINITIONS(table, BHVD_CODEC_TOPK_2BIT, TOPK_2BIT_VERSION, topk_2bit_encoded_size, topk_2bit, topk_2bit);
}
