// Codec float32: the values themselves, unchanged. For data that must be sent as codes but without loss, such as the initial
// replicas. Takes float32 only.
#include <string.h>

#include "kernel/functions.h"

static size_t float32_encoded_size(bhvd_dtype dtype, size_t count, OPTIONS)
{
    (void)dtype;
    return sizeof(float) * count;
}

static void float32_copy(void *dst, const void *src, size_t count, OPTIONS)
{
    if (count)
        memcpy(dst, src, sizeof(float) * count);
}

static void float32_decode_add(float *dst, const void *src, size_t count, OPTIONS)
{
    any_f32 *sum = dst;
    const any_f32 *values = src;
    INDEPENDENT for (size_t i = 0; i < count; i++)
        sum[i] += values[i];
}

void float32_kernels_init(struct kernel_table *table)
{
    table->codecs[BHVD_CODEC_FLOAT32][BHVD_FLOAT32] = (struct kernel_codec){
        .encoded_size = float32_encoded_size,
        .encode = float32_copy,
        .decode = float32_copy,
        .decode_add = float32_decode_add,
    };
}
