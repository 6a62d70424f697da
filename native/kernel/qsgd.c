// Codec qsgd: the definitions. Formula and layout: qsgd.h; loops: qsgd_loops.h.
#include "kernel/qsgd.h"


#define LOOPS "kernel/qsgd_loops.h"
#include "kernel/for_each_element.h"

static size_t qsgd_encoded_size(bhvd_dtype dtype, size_t count, const struct bhvd_codec_options *options)
{
    const size_t real_size = dtype == BHVD_FLOAT64 ? sizeof(double) : sizeof(float);
    if (qsgd_levels(options->parameter) == 0)
        return 0;
    return CODEC_HEADER + qsgd_norms_size(count, real_size) + codec_padded(count);
}

void qsgd_kernels_init(struct kernel_table *table)
{
    CODEC_DEFINE(BHVD_CODEC_QSGD, QSGD_VERSION, qsgd_encoded_size, qsgd, qsgd)
}
