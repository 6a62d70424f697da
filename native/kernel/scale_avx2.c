// Scaling by a factor for AVX2: the loops of scale_loops.h, and float16 and bfloat16 with vectors of float32.
#include "kernel/scale_loops.h"

#include "kernel/pairs.h"
#include "kernel/variants.h"

INLINE struct pair multiply(struct pair x, vec factor)
{
    return (struct pair){vec_canonical(x.a * factor), vec_canonical(x.b * factor)};
}

INLINE void scale_half(void *dst, const void *src, double factor, size_t count, load_pair_fn load, store_pair_fn store)
{
    enum { STEP = 2 * LANES };
    char *to = dst;
    const char *from = src;
    const vec f = vec_set1((float)factor);
    size_t i = 0;
    for (; i + STEP <= count; i += STEP)
        store(to + 2 * i, multiply(load(from + 2 * i), f));
    if (i < count) {
        uint16_t x[STEP] = {0};
        memcpy(x, from + 2 * i, 2 * (count - i));
        store(x, multiply(load(x), f));
        memcpy(to + 2 * i, x, 2 * (count - i));
    }
}

static void scale_f16_avx2(void *dst, const void *src, double factor, size_t count)
{
    scale_half(dst, src, factor, count, load_pair_f16, store_pair_f16);
}

static void scale_bf16_avx2(void *dst, const void *src, double factor, size_t count)
{
    scale_half(dst, src, factor, count, load_pair_bf16, store_pair_bf16);
}

void scale_kernels_init_avx2(struct kernel_table *table)
{
    scale_loops_init_avx2(table);
    table->scale[BHVD_FLOAT16] = scale_f16_avx2;
    table->scale[BHVD_BFLOAT16] = scale_bf16_avx2;
}
