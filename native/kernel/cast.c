// Casts between float32 and the other floating point types: the definitions. dst and src do not overlap, except that
// the float32 copy may be in place.
#include "kernel/element.h"
#include "kernel/loops.h"
#include "kernel/variants.h"

static void cast_copy_f32(void *dst, const void *src, size_t count)
{
    if (dst != src && count > 0)
        memcpy(dst, src, count * sizeof(float));
}

static void cast_f32_to_float(float *dst, const void *src, size_t count)
{
    cast_copy_f32(dst, src, count);
}

static void cast_f32_from_float(void *dst, const float *src, size_t count)
{
    cast_copy_f32(dst, src, count);
}

#define CAST(element, size)                                                                            \
    static void cast_##element##_to_float_scalar(float *dst, const void *src, size_t count)            \
    {                                                                                                  \
        INDEPENDENT for (size_t i = 0; i < count; i++)                                                 \
            store_f32((char *)dst + 4 * i, (float)load_##element((const char *)src + size * i));       \
    }                                                                                                  \
    static void cast_##element##_from_float_scalar(void *dst, const float *src, size_t count)          \
    {                                                                                                  \
        INDEPENDENT for (size_t i = 0; i < count; i++)                                                 \
            store_##element((char *)dst + size * i, load_f32((const char *)src + 4 * i));              \
    }
CAST(f16, 2)
CAST(bf16, 2)
CAST(f64, 8)

void cast_kernels_init(struct kernel_table *table, unsigned cpu)
{
    table->to_float[BHVD_FLOAT32] = cast_f32_to_float;
    table->to_float[BHVD_FLOAT16] = cast_f16_to_float_scalar;
    table->to_float[BHVD_BFLOAT16] = cast_bf16_to_float_scalar;
    table->to_float[BHVD_FLOAT64] = cast_f64_to_float_scalar;
    table->from_float[BHVD_FLOAT32] = cast_f32_from_float;
    table->from_float[BHVD_FLOAT16] = cast_f16_from_float_scalar;
    table->from_float[BHVD_BFLOAT16] = cast_bf16_from_float_scalar;
    table->from_float[BHVD_FLOAT64] = cast_f64_from_float_scalar;
    if (cpu & CPU_AVX2)
        cast_kernels_init_avx2(table);
}
