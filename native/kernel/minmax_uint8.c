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

#define CODEC_SCALAR(element)                                                                      \
    (struct kernel_codec)                                                                          \
    {                                                                                              \
        minmax_uint8_encode_##element##_scalar, minmax_uint8_decode_##element##_scalar,            \
            minmax_uint8_decode_add_##element##_scalar                                             \
    }

void minmax_uint8_kernels_init(struct kernel_table *table, unsigned cpu)
{
    table->minmax_uint8[BHVD_FLOAT32] = CODEC_SCALAR(f32);
    table->minmax_uint8[BHVD_FLOAT16] = CODEC_SCALAR(f16);
    table->minmax_uint8[BHVD_BFLOAT16] = CODEC_SCALAR(bf16);
    table->minmax_uint8[BHVD_FLOAT64] = CODEC_SCALAR(f64);
    if (cpu & CPU_AVX2)
        minmax_uint8_kernels_init_avx2(table);
    if (cpu & CPU_AVX512)
        minmax_uint8_kernels_init_avx512(table);
}

size_t minmax_uint8_size(bhvd_dtype dtype, size_t count)
{
    switch (dtype) {
    case BHVD_FLOAT16:
    case BHVD_BFLOAT16:
    case BHVD_FLOAT32:
    case BHVD_FLOAT64:
        return MINMAX_UINT8_HEADER + minmax_uint8_codes_size(count);
    default:
        return 0;
    }
}
