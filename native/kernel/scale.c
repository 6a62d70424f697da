// Scaling by a factor: the definitions, see scale_loops.h for the types that need no conversion.
#define ISA scalar
#include "kernel/scale_loops.h"

#include "kernel/element.h"

static void scale_f16_scalar(void *dst, const void *src, double factor, size_t count)
{
    for (size_t i = 0; i < count; i++)
        store_f16((char *)dst + 2 * i, canonical_nan(load_f16((const char *)src + 2 * i) * (float)factor));
}

static void scale_bf16_scalar(void *dst, const void *src, double factor, size_t count)
{
    for (size_t i = 0; i < count; i++)
        store_bf16((char *)dst + 2 * i, canonical_nan(load_bf16((const char *)src + 2 * i) * (float)factor));
}

static void scale_bool(void *dst, const void *src, double factor, size_t count)
{
    (void)factor;
    if (dst != src && count > 0)
        memcpy(dst, src, count);
}

void scale_kernels_init(struct kernel_table *table)
{
    scale_loops_init_scalar(table);
    table->scale[BHVD_FLOAT16] = scale_f16_scalar;
    table->scale[BHVD_BFLOAT16] = scale_bf16_scalar;
    table->scale[BHVD_BOOL] = scale_bool;
}
