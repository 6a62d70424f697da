// Codec ternary: the definitions. Formula and layout: ternary.h; loops: ternary_loops.h.
#include "kernel/ternary.h"


#define LOOPS "kernel/ternary_loops.h"
#include "kernel/for_each_element.h"

static size_t ternary_encoded_size(bhvd_dtype dtype, size_t count, const struct bhvd_codec_options *options)
{
    (void)dtype, (void)options;
    return CODEC_HEADER + ternary_blocks_size(count);
}

void ternary_kernels_init(struct kernel_table *table)
{
    CODEC_DEFINITIONS(table, BHVD_CODEC_TERNARY, TERNARY_VERSION, ternary_encoded_size, ternary, ternary);
}
