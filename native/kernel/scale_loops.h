// Scaling, for the types that a compiler vectorizes: scale.c compiles it as the definition, scale_avx2.c for AVX2.
// The includer defines ISA, the suffix of all names.
#include <string.h>

#include "kernel/kernel.h"
#include "kernel/loops.h"

// n if the factor is the nearest double to 1 / n, as for a mean over n ranks; otherwise 0. The caller then divides by n, because 49
// * (1. / 49) is below 1 and would be truncated to 0.
static inline double scale_divisor(double factor)
{
    const double n = factor >= 0x1p-31 && factor <= 0.5 ? (double)(int64_t)(1.0 / factor + 0.5) : 0.0;
    return n > 0 && 1.0 / n == factor ? n : 0.0;
}

static void NAME(scale_f32)(void *to, const void *from, double factor, size_t count)
{
    any_f32 *dst = to;
    const any_f32 *src = from;
    const float f = (float)factor;
    INDEPENDENT for (size_t i = 0; i < count; i++)
        dst[i] = src[i] * f;
}

static void NAME(scale_f64)(void *to, const void *from, double factor, size_t count)
{
    any_f64 *dst = to;
    const any_f64 *src = from;
    INDEPENDENT for (size_t i = 0; i < count; i++)
        dst[i] = src[i] * factor;
}

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

static void NAME(scale_loops_init)(struct kernel_table *table)
{
    table->scale[BHVD_UINT8] = NAME(scale_u8);
    table->scale[BHVD_INT8] = NAME(scale_i8);
    table->scale[BHVD_UINT16] = NAME(scale_u16);
    table->scale[BHVD_INT16] = NAME(scale_i16);
    table->scale[BHVD_INT32] = NAME(scale_i32);
    table->scale[BHVD_INT64] = NAME(scale_i64);
    table->scale[BHVD_FLOAT32] = NAME(scale_f32);
    table->scale[BHVD_FLOAT64] = NAME(scale_f64);
}
