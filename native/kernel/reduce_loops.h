// The reductions that a compiler vectorizes, written once: reduce.c compiles them as the definition, reduce_avx2.c for
// AVX2. The includer defines ISA, the suffix of all names.
//
// float minimum and maximum: of -0.0 and +0.0 the result is b; a NaN result is always the canonical one. NaN in a float sum or
// product: the result is a NaN whose payload depends on the processor.
#include <math.h>

#include "kernel/kernel.h"
#include "kernel/loops.h"

// One loop over elements of any_<element>; the expression uses them as x and y.
#define REDUCE(name, element, expression)                                                               \
    static void NAME(reduce_##name##_##element)(void *to, const void *a, const void *b, size_t count)   \
    {                                                                                                   \
        any_##element *dst = to;                                                                        \
        const any_##element *left = a, *right = b;                                                      \
        INDEPENDENT for (size_t i = 0; i < count; i++) {                                                \
            const __typeof__(left[0] + 0) x = left[i], y = right[i];                                    \
            dst[i] = (__typeof__(dst[0] + 0))(expression);                                              \
        }                                                                                               \
    }

// Sums and products of signed integers are computed as unsigned ones, which wrap; 1u * keeps uint16 products out of int.
REDUCE(sum, u8, x + y)
REDUCE(sum, u16, x + y)
REDUCE(sum, u32, x + y)
REDUCE(sum, u64, x + y)
REDUCE(sum, f32, x + y)
REDUCE(sum, f64, x + y)
REDUCE(product, u8, 1u * x * y)
REDUCE(product, u16, 1u * x * y)
REDUCE(product, u32, x * y)
REDUCE(product, u64, x * y)
REDUCE(product, f32, x * y)
REDUCE(product, f64, x * y)

#define REDUCE_MIN_MAX(element)              \
    REDUCE(min, element, x < y ? x : y)      \
    REDUCE(max, element, x > y ? x : y)
REDUCE_MIN_MAX(u8)
REDUCE_MIN_MAX(i8)
REDUCE_MIN_MAX(u16)
REDUCE_MIN_MAX(i16)
REDUCE_MIN_MAX(i32)
REDUCE_MIN_MAX(i64)
REDUCE(min, f32, x != x || y != y ? (float)NAN : x < y ? x : y)
REDUCE(max, f32, x != x || y != y ? (float)NAN : x > y ? x : y)
REDUCE(min, f64, x != x || y != y ? (double)NAN : x < y ? x : y)
REDUCE(max, f64, x != x || y != y ? (double)NAN : x > y ? x : y)

REDUCE(or, u8, (x | y) != 0)
REDUCE(and, u8, (x != 0) & (y != 0))

#define REDUCE_FILL(dtype, sum, product, min, max)                          \
    table->reduce[KERNEL_SUM][dtype] = NAME(reduce_##sum);                  \
    table->reduce[KERNEL_PRODUCT][dtype] = NAME(reduce_##product);          \
    table->reduce[KERNEL_MIN][dtype] = NAME(reduce_##min);                  \
    table->reduce[KERNEL_MAX][dtype] = NAME(reduce_##max)

static void NAME(reduce_loops_init)(struct kernel_table *table)
{
    REDUCE_FILL(BHVD_UINT8, sum_u8, product_u8, min_u8, max_u8);
    REDUCE_FILL(BHVD_INT8, sum_u8, product_u8, min_i8, max_i8);
    REDUCE_FILL(BHVD_UINT16, sum_u16, product_u16, min_u16, max_u16);
    REDUCE_FILL(BHVD_INT16, sum_u16, product_u16, min_i16, max_i16);
    REDUCE_FILL(BHVD_INT32, sum_u32, product_u32, min_i32, max_i32);
    REDUCE_FILL(BHVD_INT64, sum_u64, product_u64, min_i64, max_i64);
    REDUCE_FILL(BHVD_FLOAT32, sum_f32, product_f32, min_f32, max_f32);
    REDUCE_FILL(BHVD_FLOAT64, sum_f64, product_f64, min_f64, max_f64);
    REDUCE_FILL(BHVD_BOOL, or_u8, and_u8, and_u8, or_u8);
}
