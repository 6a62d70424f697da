#include "primitive/encoder.h"

#include <math.h>

struct encoder encoder_init(const struct kernel_table *kernels, const struct collective *coll, int rank)
{
    const bhvd_dtype dtype = coll->tensors[0].dtype;
    return (struct encoder){
        .kernels = kernels,
        .codec = &kernels->codecs[coll->args.codec][dtype],
        .options = coll->args.codec_options,
        .dtype = dtype,
        .element = bhvd_dtype_size(dtype),
        .rank = rank,
    };
}

size_t encoder_stride(const struct encoder *e, size_t count)
{
    return count ? size_round_up(e->codec->encoded_size(e->dtype, count, &e->options), CACHE_LINE) : 0;
}

// residual -= decoded, where that is finite: a NaN or Inf is shown once, in the result; fed back it would never go away.
static void update_residual(float *restrict residual, const float *restrict decoded, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        float difference = residual[i] - decoded[i];
        residual[i] = isfinite(difference) ? difference : 0.0f;
    }
}

void encoder_encode(const struct encoder *e, unsigned char *code, const void *value, size_t count, float *residual,
                    enum encoder_pass pass, size_t begin)
{
    const struct kernel_table *kernels = e->kernels;
    struct bhvd_codec_options options = e->options;
    options.seed = segments_mix(encoder_seed(e, pass), begin);
    if (!residual) {
        e->codec->encode(code, value, count, &options);
        return;
    }
    // The error is taken against the float32 sum, so that the rounding to the dtype is fed back too.
    if (e->dtype == BHVD_FLOAT32) {
        kernels->reduce[KERNEL_SUM][BHVD_FLOAT32](residual, residual, value, count);
        e->codec->encode(code, residual, count, &options);
        e->codec->decode(e->wide, code, count, &options);
    } else {
        kernels->to_float[e->dtype](e->wide, value, count);
        kernels->reduce[KERNEL_SUM][BHVD_FLOAT32](residual, residual, e->wide, count);
        kernels->from_float[e->dtype](e->value, residual, count);
        e->codec->encode(code, e->value, count, &options);
        e->codec->decode(e->value, code, count, &options);
        kernels->to_float[e->dtype](e->wide, e->value, count);
    }
    update_residual(residual, e->wide, count);
}
