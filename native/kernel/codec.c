// All codecs of the kernel table, and the codec functions of the public interface. No state.
#include "kernel/codec.h"

#include "base/dtype.h"
#include "kernel/kernel.h"

static const struct bhvd_codec_options defaults;

void codec_kernels_init(struct kernel_table *table, unsigned cpu)
{
    minmax_uint8_kernels_init(table, cpu);
    float32_kernels_init(table, cpu);
    sign_kernels_init(table, cpu);
    ternary_kernels_init(table, cpu);
    qsgd_kernels_init(table, cpu);
    half_kernels_init(table, cpu);
    topk_kernels_init(table, cpu);
    blocks_kernels_init(table, cpu);
    rotated_kernels_init(table, cpu);
}

// The codec's kernels for this dtype, best of this CPU, and *options for them; false when it does not take the dtype.
static bool codec_find(bhvd_codec codec, bhvd_dtype dtype, const struct bhvd_codec_options **options,
                       struct kernel_codec *out)
{
    if ((int)codec < 0 || codec >= BHVD_CODEC_COUNT || !dtype_is_valid(dtype))
        return false;
    struct kernel_table table;
    memset(table.codecs, 0, sizeof table.codecs);
    codec_kernels_init(&table, cpu_features());
    *out = table.codecs[codec][dtype];
    if (!*options)
        *options = &defaults;
    return out->encoded_size != NULL;
}

size_t bhvd_encoded_size(bhvd_codec codec, bhvd_dtype dtype, size_t count, const struct bhvd_codec_options *options)
{
    struct kernel_codec kernels;
    return codec_find(codec, dtype, &options, &kernels) ? kernels.encoded_size(dtype, count, options) : 0;
}

static bhvd_status check(const struct kernel_codec *kernels, bhvd_dtype dtype, size_t count,
                         const struct bhvd_codec_options *options)
{
    return count > 0 && kernels->encoded_size(dtype, count, options) == 0 ? BHVD_ERR_ARGUMENT : BHVD_OK;
}

static bhvd_status check_code(const struct kernel_codec *kernels, bhvd_dtype dtype, const void *src, size_t count,
                              const struct bhvd_codec_options *options)
{
    if (kernels->version && ((const uint8_t *)src)[CODEC_VERSION_AT] != kernels->version)
        return BHVD_ERR_ARGUMENT;
    return check(kernels, dtype, count, options);
}

bhvd_status bhvd_encode(bhvd_codec codec, bhvd_dtype dtype, void *dst, const void *src, size_t count,
                        const struct bhvd_codec_options *options)
{
    struct kernel_codec kernels;
    if (!codec_find(codec, dtype, &options, &kernels))
        return BHVD_ERR_UNSUPPORTED;
    const bhvd_status status = check(&kernels, dtype, count, options);
    if (status == BHVD_OK)
        kernels.encode(dst, src, count, options);
    return status;
}

bhvd_status bhvd_decode(bhvd_codec codec, bhvd_dtype dtype, void *dst, const void *src, size_t count,
                        const struct bhvd_codec_options *options)
{
    struct kernel_codec kernels;
    if (!codec_find(codec, dtype, &options, &kernels))
        return BHVD_ERR_UNSUPPORTED;
    const bhvd_status status = check_code(&kernels, dtype, src, count, options);
    if (status == BHVD_OK)
        kernels.decode(dst, src, count, options);
    return status;
}

bhvd_status bhvd_decode_add(bhvd_codec codec, bhvd_dtype dtype, float *dst, const void *src, size_t count,
                            const struct bhvd_codec_options *options)
{
    struct kernel_codec kernels;
    if (!codec_find(codec, dtype, &options, &kernels))
        return BHVD_ERR_UNSUPPORTED;
    const bhvd_status status = check_code(&kernels, dtype, src, count, options);
    if (status == BHVD_OK)
        kernels.decode_add(dst, src, count, options);
    return status;
}
