// Codec minmax_uint8: the definitions. Formula and layout: minmax_uint8.h; loops: minmax_uint8_loops.h.
#include "kernel/minmax_uint8.h"

#define LOOPS "kernel/minmax_uint8_loops.h"
#include "kernel/for_each_element.h"

static size_t minmax_uint8_encoded_size(bhvd_dtype dtype, size_t count, const struct bhvd_codec_options *options)
{
    (void)dtype, (void)options;
    return CODEC_HEADER + codec_padded(count);
}

void minmax_uint8_kernels_init(struct kernel_table *table)
{
    CODEC_DEFINE(BHVD_CODEC_MINMAX_UINT8, MINMAX_UINT8_VERSION, minmax_uint8_encoded_size, minmax_uint8, minmax_uint8)
}
