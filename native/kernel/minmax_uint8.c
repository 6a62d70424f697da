// Codec minmax_uint8: the definitions. Formula and layout: minmax_uint8.h; loops: minmax_uint8_loops.h.
#include "kernel/minmax_uint8.h"

#include <float.h>

#include "kernel/element.h"
#include "kernel/loops.h"
#include "kernel/variants.h"

#define ISA scalar

#define ELEMENT f32
#define REAL float
#define REAL_MAX FLT_MAX
#define SIZE 4
#include "kernel/minmax_uint8_loops.h"

#define ELEMENT f16
#define REAL float
#define REAL_MAX FLT_MAX
#define SIZE 2
#include "kernel/minmax_uint8_loops.h"

#define ELEMENT bf16
#define REAL float
#define REAL_MAX FLT_MAX
#define SIZE 2
#include "kernel/minmax_uint8_loops.h"

#define ELEMENT f64
#define REAL double
#define REAL_MAX DBL_MAX
#define SIZE 8
#include "kernel/minmax_uint8_loops.h"

static size_t minmax_uint8_encoded_size(bhvd_dtype dtype, size_t count, const struct bhvd_codec_options *options)
{
    (void)dtype, (void)options;
    return CODEC_HEADER + codec_padded(count);
}

#define CODEC_FILL(dtype, element)                                                            \
    table->codecs[BHVD_CODEC_MINMAX_UINT8][dtype] = (struct kernel_codec)                     \
    {                                                                                         \
        minmax_uint8_encoded_size, minmax_uint8_encode_##element##_scalar,                    \
            minmax_uint8_decode_##element##_scalar, minmax_uint8_decode_add_##element##_scalar, \
            MINMAX_UINT8_VERSION                                                              \
    }

void minmax_uint8_kernels_init(struct kernel_table *table, unsigned cpu)
{
    CODEC_FILL(BHVD_FLOAT32, f32);
    CODEC_FILL(BHVD_FLOAT16, f16);
    CODEC_FILL(BHVD_BFLOAT16, bf16);
    CODEC_FILL(BHVD_FLOAT64, f64);
    if (cpu & CPU_AVX2)
        minmax_uint8_kernels_init_avx2(table);
    if (cpu & CPU_AVX512)
        minmax_uint8_kernels_init_avx512(table);
}
