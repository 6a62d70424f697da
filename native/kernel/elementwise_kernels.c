// Elementwise arithmetic: reductions of two vectors, and scaling by a factor.
//
// float minimum and maximum: of -0.0 and +0.0 the result is b; a NaN result is always the canonical one. NaN in a float sum or
// product: the result is a NaN whose payload depends on the processor.
#include "kernel/loops.h"
#ifdef VECTORS
#include "kernel/vectors.h"
#endif

// --------------------------------------------------------------------------- reductions that the compiler vectorizes

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
#define REDUCE_SUM_PRODUCT(element, one)     \
    REDUCE(sum, element, x + y)              \
    REDUCE(product, element, one * x * y)
REDUCE_SUM_PRODUCT(u8, 1u)
REDUCE_SUM_PRODUCT(u16, 1u)
REDUCE_SUM_PRODUCT(u32, 1u)
REDUCE_SUM_PRODUCT(u64, 1u)
REDUCE_SUM_PRODUCT(f32, 1.0f)
REDUCE_SUM_PRODUCT(f64, 1.0)

#define REDUCE_MIN_MAX(element)              \
    REDUCE(min, element, x < y ? x : y)      \
    REDUCE(max, element, x > y ? x : y)
REDUCE_MIN_MAX(u8)
REDUCE_MIN_MAX(i8)
REDUCE_MIN_MAX(u16)
REDUCE_MIN_MAX(i16)
REDUCE_MIN_MAX(i32)
REDUCE_MIN_MAX(i64)
#define REDUCE_MIN_MAX_FLOAT(element, nan)                               \
    REDUCE(min, element, x != x || y != y ? nan : x < y ? x : y)         \
    REDUCE(max, element, x != x || y != y ? nan : x > y ? x : y)
REDUCE_MIN_MAX_FLOAT(f32, (float)NAN)
REDUCE_MIN_MAX_FLOAT(f64, (double)NAN)

typedef any_u8 any_b8;                  // bool
REDUCE(sum, b8, (x | y) != 0)
REDUCE(max, b8, (x | y) != 0)
REDUCE(product, b8, (x != 0) & (y != 0))
REDUCE(min, b8, (x != 0) & (y != 0))

// ------------------------------------------------------------------------------ scaling that the compiler vectorizes

// n if the factor is the nearest double to 1 / n, as for a mean over n ranks; otherwise 0. The caller then divides by n, because 49
// * (1. / 49) is below 1 and would be truncated to 0.
static inline double scale_divisor(double factor)
{
    const double n = factor >= 0x1p-31 && factor <= 0.5 ? (double)(int64_t)(1.0 / factor + 0.5) : 0.0;
    return n > 0 && 1.0 / n == factor ? n : 0.0;
}

#define SCALE_FLOAT(element, real)                                                                    \
    static void NAME(scale_##element)(void *to, const void *from, double factor, size_t count)        \
    {                                                                                                 \
        any_##element *dst = to;                                                                      \
        const any_##element *src = from;                                                              \
        const real f = (real)factor;                                                                  \
        INDEPENDENT for (size_t i = 0; i < count; i++)                                                \
            dst[i] = src[i] * f;                                                                      \
    }
SCALE_FLOAT(f32, float)
SCALE_FLOAT(f64, double)

// Integers: conversion from double truncates. A NaN product (infinite factor, element 0) gives 0.
#define SCALE_INTEGERS(expression, low, high)                                                         \
    INDEPENDENT for (size_t i = 0; i < count; i++)                                                    \
    {                                                                                                 \
        const double product = (expression), number = product == product ? product : 0.0;             \
        const double above = number > (low) ? number : (low);                                         \
        dst[i] = (__typeof__(dst[0] + 0))(above < (high) ? above : (high));                           \
    }
#define SCALE_INTEGER(element, low, high)                                                             \
    static void NAME(scale_##element)(void *to, const void *from, double factor, size_t count)        \
    {                                                                                                 \
        any_##element *dst = to;                                                                      \
        const any_##element *src = from;                                                              \
        const double divisor = scale_divisor(factor);                                                 \
        if (divisor > 0)                                                                              \
            SCALE_INTEGERS(src[i] / divisor, low, high)                                               \
        else                                                                                          \
            SCALE_INTEGERS(src[i] * factor, low, high)                                                \
    }
SCALE_INTEGER(u8, 0.0, (double)UINT8_MAX)
SCALE_INTEGER(i8, (double)INT8_MIN, (double)INT8_MAX)
SCALE_INTEGER(u16, 0.0, (double)UINT16_MAX)
SCALE_INTEGER(i16, (double)INT16_MIN, (double)INT16_MAX)
SCALE_INTEGER(i32, (double)INT32_MIN, (double)INT32_MAX)

// The upper limit is not a double: 2^63 is the first one past it.
static void NAME(scale_i64)(void *to, const void *from, double factor, size_t count)
{
    any_i64 *dst = to;
    const any_i64 *src = from;
    const int64_t divisor = (int64_t)scale_divisor(factor);
    for (size_t i = 0; i < count; i++) {
        const double product = (double)src[i] * factor;
        if (divisor > 0)
            dst[i] = src[i] / divisor;
        else if (product >= 0x1p63)
            dst[i] = INT64_MAX;
        else if (product < -0x1p63)
            dst[i] = INT64_MIN;
        else
            dst[i] = product == product ? (int64_t)product : 0;
    }
}

static void NAME(scale_b8)(void *dst, const void *src, double factor, size_t count)
{
    (void)factor;
    if (dst != src && count > 0)
        memcpy(dst, src, count);
}

// ----------------------------------------------------------------------------------------------- float16 and bfloat16

// They are computed in float32; every NaN result is the canonical one.
#ifdef VECTORS
// Two vectors of elements, in an order that depends on the type. (bfloat16: even and odd elements, which needs no shuffle.)
typedef vec number;
typedef struct {
    vec a, b;
} numbers;

INLINE numbers load_f16s(const void *p) { return (numbers){vec_load_f16(p), vec_load_f16((const char *)p + sizeof(halves))}; }
INLINE void store_f16s(void *p, numbers x) { vec_store_two_f16(p, x.a, x.b); }

INLINE numbers load_bf16s(const void *p)
{
    const whole bits = (whole)vec_load(p);
    return (numbers){(vec)(bits << 16), (vec)(bits & 0xffff0000)};
}

INLINE void store_bf16s(void *p, numbers x)
{
    vec_store(p, (vec)whole_with_upper(rounded_bf16(x.a) >> 16, rounded_bf16(x.b)));
}

// The instruction returns y when either is NaN, so a NaN in x must be restored.
INLINE vec minimum(vec x, vec y) { return vec_choose(vec_unordered(x, x), vec_min(x, y), x); }
INLINE vec maximum(vec x, vec y) { return vec_choose(vec_unordered(x, x), vec_max(x, y), x); }

INLINE numbers all_equal(float x) { return (numbers){vec_set1(x), vec_set1(x)}; }

INLINE numbers operate(numbers x, numbers y, number (*operation)(number x, number y))
{
    return (numbers){vec_canonical(operation(x.a, y.a)), vec_canonical(operation(x.b, y.b))};
}
#else
typedef float number, numbers;

#define load_f16s load_f16
#define load_bf16s load_bf16
#define store_f16s store_f16
#define store_bf16s store_bf16
INLINE float minimum(float x, float y) { return x != x || y != y ? (float)NAN : x < y ? x : y; }
INLINE float maximum(float x, float y) { return x != x || y != y ? (float)NAN : x > y ? x : y; }
INLINE float all_equal(float x) { return x; }
INLINE float operate(float x, float y, float (*operation)(float x, float y)) { return canonical_nan(operation(x, y)); }
#endif

INLINE number sum(number x, number y) { return x + y; }
INLINE number product(number x, number y) { return x * y; }

// to[i] = a[i] (op) b[i]. b NULL: a[i] (op) factor.
INLINE void half_loop(char *to, const char *a, const char *b, float factor, size_t count, numbers (*load)(const void *p),
                      void (*store)(void *p, numbers x), number (*operation)(number x, number y))
{
    enum { SIZE = sizeof(any_f16), STEP = sizeof(numbers) / sizeof(float) };
    const numbers by = all_equal(factor);
    size_t i = 0;
    for (; i + STEP <= count; i += STEP)
        store(to + SIZE * i, operate(load(a + SIZE * i), b ? load(b + SIZE * i) : by, operation));
    if (i < count) {
        const size_t left = SIZE * (count - i);
        uint16_t x[STEP] = {0}, y[STEP] = {0};
        memcpy(x, a + SIZE * i, left);
        if (b)
            memcpy(y, b + SIZE * i, left);
        store(x, operate(load(x), b ? load(y) : by, operation));
        memcpy(to + SIZE * i, x, left);
    }
}

#define REDUCE_HALF(name, element, operation)                                                               \
    static void NAME(reduce_##name##_##element)(void *dst, const void *a, const void *b, size_t count)      \
    {                                                                                                       \
        half_loop(dst, a, b, 0, count, load_##element##s, store_##element##s, operation);                   \
    }
#define HALF(element)                                                                                     \
    REDUCE_HALF(sum, element, sum)                                                                        \
    REDUCE_HALF(product, element, product)                                                                \
    REDUCE_HALF(min, element, minimum)                                                                    \
    REDUCE_HALF(max, element, maximum)                                                                    \
    static void NAME(scale_##element)(void *dst, const void *src, double factor, size_t count)            \
    {                                                                                                     \
        half_loop(dst, src, NULL, (float)factor, count, load_##element##s, store_##element##s, product);  \
    }
HALF(f16)
HALF(bf16)

// -------------------------------------------------------------------------------------------------------------- table

// Integers wrap in the same way with and without a sign.
#define FILL(dtype, wrapping, ordered)                                      \
    table->reduce[KERNEL_SUM][dtype] = NAME(reduce_sum_##wrapping);         \
    table->reduce[KERNEL_PRODUCT][dtype] = NAME(reduce_product_##wrapping); \
    table->reduce[KERNEL_MIN][dtype] = NAME(reduce_min_##ordered);          \
    table->reduce[KERNEL_MAX][dtype] = NAME(reduce_max_##ordered);          \
    table->scale[dtype] = NAME(scale_##ordered)

void NAME(elementwise_kernels_init)(struct kernel_table *table)
{
    FILL(BHVD_UINT8, u8, u8);
    FILL(BHVD_INT8, u8, i8);
    FILL(BHVD_UINT16, u16, u16);
    FILL(BHVD_INT16, u16, i16);
    FILL(BHVD_INT32, u32, i32);
    FILL(BHVD_INT64, u64, i64);
    FILL(BHVD_FLOAT16, f16, f16);
    FILL(BHVD_FLOAT32, f32, f32);
    FILL(BHVD_FLOAT64, f64, f64);
    FILL(BHVD_BFLOAT16, bf16, bf16);
    FILL(BHVD_BOOL, b8, b8);
}
