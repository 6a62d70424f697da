// Elementwise reductions for AVX2: the loops of reduce_loops.h, and float16 and bfloat16 with vectors of float32.
#include "kernel/reduce_loops.h"

#include "kernel/pairs.h"
#include "kernel/variants.h"

typedef vec (*operation_fn)(vec x, vec y);

INLINE vec add(vec x, vec y) { return x + y; }
INLINE vec multiply(vec x, vec y) { return x * y; }
// The instruction returns y when either is NaN, so a NaN in x must be restored.
INLINE vec minimum(vec x, vec y) { return vec_choose(vec_unordered(x, x), vec_min(x, y), x); }
INLINE vec maximum(vec x, vec y) { return vec_choose(vec_unordered(x, x), vec_max(x, y), x); }

INLINE struct pair operate(struct pair x, struct pair y, operation_fn operation)
{
    return (struct pair){vec_canonical(operation(x.a, y.a)), vec_canonical(operation(x.b, y.b))};
}

INLINE void reduce_half(void *dst, const void *a, const void *b, size_t count, load_pair_fn load, store_pair_fn store,
                        operation_fn operation)
{
    enum { STEP = 2 * LANES };
    char *to = dst;
    const char *left = a, *right = b;
    size_t i = 0;
    for (; i + STEP <= count; i += STEP)
        store(to + 2 * i, operate(load(left + 2 * i), load(right + 2 * i), operation));
    if (i < count) {
        uint16_t x[STEP] = {0}, y[STEP] = {0};
        memcpy(x, left + 2 * i, 2 * (count - i));
        memcpy(y, right + 2 * i, 2 * (count - i));
        store(x, operate(load(x), load(y), operation));
        memcpy(to + 2 * i, x, 2 * (count - i));
    }
}

#define REDUCE_HALF(name, element, operation)                                                               \
    static void reduce_##name##_##element##_avx2(void *dst, const void *a, const void *b, size_t count)     \
    {                                                                                                       \
        reduce_half(dst, a, b, count, load_pair_##element, store_pair_##element, operation);                \
    }
#define REDUCE_HALF_ALL(element)                \
    REDUCE_HALF(sum, element, add)              \
    REDUCE_HALF(product, element, multiply)     \
    REDUCE_HALF(min, element, minimum)          \
    REDUCE_HALF(max, element, maximum)
REDUCE_HALF_ALL(f16)
REDUCE_HALF_ALL(bf16)

void reduce_kernels_init_avx2(struct kernel_table *table)
{
    reduce_loops_init_avx2(table);
    REDUCE_FILL(BHVD_FLOAT16, sum_f16, product_f16, min_f16, max_f16);
    REDUCE_FILL(BHVD_BFLOAT16, sum_bf16, product_bf16, min_bf16, max_bf16);
}
