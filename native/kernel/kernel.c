// Puts the kernel table together, and serves the codec functions of the public interface from it. No state.
#include "kernel/kernel.h"

#include <string.h>

#include "base/dtype.h"
#include "kernel/minmax_uint8.h"
#include "kernel/variants.h"

unsigned cpu_features(void)
{
    return variants_cpu_features();
}

void kernel_table_init(struct kernel_table *table, unsigned cpu)
{
    memset(table, 0, sizeof *table);
    reduce_kernels_init(table, cpu);
    scale_kernels_init(table, cpu);
    cast_kernels_init(table, cpu);
    minmax_uint8_kernels_init(table, cpu);
}

const char *bhvd_cpu_features(void)
{
    const unsigned cpu = cpu_features();
    return cpu & CPU_AVX512 ? "avx512" : cpu & CPU_AVX2 ? "avx2" : "scalar";
}

const char *bhvd_version(void)
{
    return "0.1.0";
}

size_t bhvd_encoded_size(bhvd_codec codec, bhvd_dtype dtype, size_t count)
{
    return codec == BHVD_CODEC_MINMAX_UINT8 ? minmax_uint8_size(dtype, count) : 0;
}

// The codec's kernels for this dtype; false when it does not take it.
static bool codec_find(bhvd_codec codec, bhvd_dtype dtype, struct kernel_codec *out)
{
    if (bhvd_encoded_size(codec, dtype, 0) == 0)
        return false;
    struct kernel_table table;
    memset(&table, 0, sizeof table);
    minmax_uint8_kernels_init(&table, cpu_features());
    *out = table.minmax_uint8[dtype];
    return true;
}

bhvd_status bhvd_encode(bhvd_codec codec, bhvd_dtype dtype, void *dst, const void *src, size_t count)
{
    struct kernel_codec kernels;
    if (!codec_find(codec, dtype, &kernels))
        return BHVD_ERR_UNSUPPORTED;
    kernels.encode(dst, src, count);
    return BHVD_OK;
}

// BHVD_ERR_ARGUMENT: the bytes do not begin with a header of this version; dst is untouched.
bhvd_status bhvd_decode(bhvd_codec codec, bhvd_dtype dtype, void *dst, const void *src, size_t count)
{
    struct kernel_codec kernels;
    if (!codec_find(codec, dtype, &kernels))
        return BHVD_ERR_UNSUPPORTED;
    if (((const uint8_t *)src)[MINMAX_UINT8_VERSION_AT] != MINMAX_UINT8_VERSION)
        return BHVD_ERR_ARGUMENT;
    kernels.decode(dst, src, count);
    return BHVD_OK;
}
