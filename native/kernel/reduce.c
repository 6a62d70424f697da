// Elementwise reductions: the definitions, see reduce_loops.h for the types that need no conversion.
#define ISA scalar
#include "kernel/reduce_loops.h"

#include "kernel/element.h"

// float16 and bfloat16 are computed in float32; every NaN result is the canonical one.
#define REDUCE_HALF(name, element, expression)                                                               \
    static void reduce_##name##_##element##_scalar(void *dst, const void *a, const void *b, size_t count)    \
    {                                                                                                        \
        for (size_t i = 0; i < count; i++) {                                                                 \
            const float x = load_##element((const char *)a + 2 * i), y = load_##element((const char *)b + 2 * i); \
            store_##element((char *)dst + 2 * i, canonical_nan(expression));                                 \
        }                                                                                                    \
    }

#define REDUCE_HALF_ALL(element)                                                          \
    REDUCE_HALF(sum, element, x + y)                                                      \
    REDUCE_HALF(product, element, x *y)                                                   \
    REDUCE_HALF(min, element, x != x || y != y ? (float)NAN : x < y ? x : y)              \
    REDUCE_HALF(max, element, x != x || y != y ? (float)NAN : x > y ? x : y)
REDUCE_HALF_ALL(f16)
REDUCE_HALF_ALL(bf16)

void reduce_kernels_init(struct kernel_table *table)
{
    reduce_loops_init_scalar(table);
    REDUCE_FILL(BHVD_FLOAT16, sum_f16, product_f16, min_f16, max_f16);
    REDUCE_FILL(BHVD_BFLOAT16, sum_bf16, product_bf16, min_bf16, max_bf16);
}
