// Codecs sign and sign_rms: the definitions. Formula and layout: sign.h; loops: sign_loops.h.
#include "kernel/sign.h"

#define LOOPS "kernel/sign_loops.h"
#include "kernel/for_each_element.h"

static size_t sign_encoded_size(bhvd_dtype dtype, size_t count, const struct bhvd_codec_options *options)
{
    (void)dtype, (void)options;
    return CODEC_HEADER + sign_bits_size(count);
}

void sign_kernels_init(struct kernel_table *table)
{
    CODEC_DEFINE(BHVD_CODEC_SIGN, SIGN_VERSION, sign_encoded_size, sign, sign)
    CODEC_DEFINE(BHVD_CODEC_SIGN_RMS, SIGN_VERSION, sign_encoded_size, sign_rms, sign)
}
