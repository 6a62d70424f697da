// Block codecs: the definitions. Formulas and layout: blocks.h; loops: blocks_loops.h.
#include "kernel/blocks.h"

#define LOOPS "kernel/blocks_loops.h"
#include "kernel/for_each_element.h"

static size_t encoded_size(const struct blocks_format *format, bhvd_dtype dtype, size_t count,
                           const struct bhvd_codec_options *options)
{
    const size_t real_size = dtype == BHVD_FLOAT64 ? sizeof(double) : sizeof(float), size = blocks_size(options->parameter);
    if (size == 0)
        return 0;
    return CODEC_HEADER + blocks_scales_size(count, size, real_size) + blocks_codes_size(format, count);
}

#define BLOCKS_DEFINITIONS(codec, name, format) CODEC_DEFINE(codec, BLOCKS_VERSION, name##_encoded_size, name, name)
#define BLOCKS_ENCODED_SIZE(codec, name, format)                                                                    \
    static size_t name##_encoded_size(bhvd_dtype dtype, size_t count, const struct bhvd_codec_options *options)     \
    {                                                                                                               \
        return encoded_size(&format, dtype, count, options);                                                        \
    }
BLOCKS_EACH(BLOCKS_ENCODED_SIZE)

void blocks_kernels_init(struct kernel_table *table)
{
    BLOCKS_EACH(BLOCKS_DEFINITIONS)
}
