// Codecs topk and topk_2bit: encoding one element at a time; decoding.
#define ISA scalar
#include "kernel/topk_2bit.h"

#define AT_LEAST(element) NULL
TOPK_EACH_TYPE(TOPK_ENCODERS)

#define TOPK_DECODERS_OF(name, element, size)                                           \
    DECODE(name, element)                                                               \
    {                                                                                   \
        struct name##_reader reader = name##_reader(src, count, options->parameter);    \
        size_t index;                                                                   \
        uint64_t x = 0;                                                                 \
        if (count > 0)                                                                  \
            memset(dst, 0, count * size);                                               \
        while (name##_next(&reader, &element, &index, &x))                              \
            if (index < count)                                                          \
                memcpy((char *)dst + index * size, &x, size);                           \
    }                                                                                   \
    DECODE_ADD(name, element)                                                           \
    {                                                                                   \
        struct name##_reader reader = name##_reader(src, count, options->parameter);    \
        size_t index;                                                                   \
        uint64_t x = 0;                                                                 \
        while (name##_next(&reader, &element, &index, &x))                              \
            if (index < count) {                                                        \
                char *sum = (char *)dst + 4 * index;                                    \
                store_f32(sum, (float)(load_f32(sum) + load_##element(&x)));            \
            }                                                                           \
    }
#define TOPK_DECODERS(element, size, infinity, nan)     \
    TOPK_DECODERS_OF(topk, element, size)               \
    TOPK_DECODERS_OF(topk_2bit, element, size)
TOPK_EACH_TYPE(TOPK_DECODERS)

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
    CODEC_DEFINE(BHVD_CODEC_TOPK, TOPK_VERSION, topk_encoded_size, topk, topk)
    CODEC_DEFINE(BHVD_CODEC_TOPK_2BIT, TOPK_2BIT_VERSION, topk_2bit_encoded_size, topk_2bit, topk_2bit)
}
