// The codec functions of the public interface. Stateless.
#include "kernel/codec.h"

#include "base/dtype.h"
#include "kernel/kernel.h"

static const struct bhvd_codec_options defaults;

// The codec's kernels for this dtype; sets *options to the defaults if NULL. NULL: the codec does not support the dtype.
static const struct kernel_codec *codec_find(bhvd_codec codec, bhvd_dtype dtype, const struct bhvd_codec_options **options)
{
    if ((int)codec < 0 || codec >= BHVD_CODEC_COUNT || !dtype_is_valid(dtype))
        return NULL;
    if (!*options)
        *options = &defaults;
    const struct kernel_codec *kernels = &kernel_table_best()->codecs[codec][dtype];
    return kernels->encoded_size ? kernels : NULL;
}

size_t bhvd_encoded_size(bhvd_codec codec, bhvd_dtype dtype, size_t count, const struct bhvd_codec_options *options)
{
    const struct kernel_codec *kernels = codec_find(codec, dtype, &options);
    return kernels ? kernels->encoded_size(dtype, count, options) : 0;
}

// Finds the kernels for encoding, or for decoding src if it is not NULL.
static bhvd_status check(bhvd_codec codec, bhvd_dtype dtype, const void *src, size_t count,
                         const struct bhvd_codec_options **options, const struct kernel_codec **kernels)
{
    *kernels = codec_find(codec, dtype, options);
    if (!*kernels)
        return BHVD_ERR_UNSUPPORTED;
    if (src && (*kernels)->version && ((const uint8_t *)src)[CODEC_VERSION_AT] != (*kernels)->version)
        return BHVD_ERR_ARGUMENT;
    return count > 0 && (*kernels)->encoded_size(dtype, count, *options) == 0 ? BHVD_ERR_ARGUMENT : BHVD_OK;
}

bhvd_status bhvd_encode(bhvd_codec codec, bhvd_dtype dtype, void *dst, const void *src, size_t count,
                        const struct bhvd_codec_options *options)
{
    const struct kernel_codec *kernels;
    const bhvd_status status = check(codec, dtype, NULL, count, &options, &kernels);
    if (status == BHVD_OK)
        kernels->encode(dst, src, count, options);
    return status;
}

bhvd_status bhvd_decode(bhvd_codec codec, bhvd_dtype dtype, void *dst, const void *src, size_t count,
                        const struct bhvd_codec_options *options)
{
    const struct kernel_codec *kernels;
    const bhvd_status status = check(codec, dtype, src, count, &options, &kernels);
    if (status == BHVD_OK)
        kernels->decode(dst, src, count, options);
    return status;
}

bhvd_status bhvd_decode_add(bhvd_codec codec, bhvd_dtype dtype, float *dst, const void *src, size_t count,
                            const struct bhvd_codec_options *options)
{
    const struct kernel_codec *kernels;
    const bhvd_status status = check(codec, dtype, src, count, &options, &kernels);
    if (status == BHVD_OK)
        kernels->decode_add(dst, src, count, options);
    return status;
}
