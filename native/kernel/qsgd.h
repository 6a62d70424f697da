// Codec qsgd: each element as one of 2 s + 1 levels between -n and n, rounded at random so that the mean is the element.
//
//     n = ||x||_2 over a block of 512 elements        f = s / n
//     encode: q = sign(x) min(floor(|x| f + u), s)        decode: x' = (q / s) n
//
// s is options.parameter, u is codec_uniform(seed, i) with i the index in the chunk, see codec_random.h: E x' = x
// within 2^-17 n / s. real is float for float32, float16 and bfloat16, double for float64; n is summed in double in the
// order of codec_sums.h; n and f are computed in double, then rounded to real; so is 1 / s, and x' = (q (1 / s)) n,
// never beyond n.
//
// Source: QSGD, Alistarh et al., arXiv:1610.02132. Differs:
// - n is at most the largest number of the element type, so that a level cannot overflow; and at least s 2^-126
//   (double: s 2^-1022) unless 0, so that f is a number. Any n >= max |x| keeps the mean.
// - The levels are bytes: no Elias coding.
// - NaN or infinity in a block, or a float64 sum beyond the largest double: n is NaN, the whole block decodes to NaN.
//   Other blocks are unaffected.
//
// Wire (see codec.h): a header, then n for each block, float32 or float64, then zeros up to a multiple of 32 bytes,
// then q for each element, int8, then zeros up to a multiple of 32 bytes.
//     18: s
#pragma once

#include <math.h>

#include "kernel/codec_random.h"
#include "kernel/codec_sums.h"

enum {
    QSGD_VERSION = 1,
    QSGD_BLOCK = 512,                   // elements
    QSGD_LEVELS_AT = 18,
    QSGD_LEVELS_MAX = 127
};

// s; 0: the parameter is out of range.
CODEC_INLINE int qsgd_levels(double parameter)
{
    if (parameter == 0)
        return QSGD_LEVELS_MAX;
    return parameter >= 1 && parameter <= QSGD_LEVELS_MAX && parameter == (int)parameter ? (int)parameter : 0;
}

CODEC_INLINE size_t qsgd_norms_size(size_t count, size_t real_size)
{
    return codec_padded((count / QSGD_BLOCK + (count % QSGD_BLOCK != 0)) * real_size);
}

#define QSGD_ARITHMETIC(real, floor_real, scale_max)                                                \
    /* n from the sum of squares; largest: number of the element type */                            \
    CODEC_INLINE real qsgd_##real##_norm(double squares, int levels, double largest)                \
    {                                                                                               \
        const double n = sqrt(squares), smallest = levels / (scale_max);                            \
        if (!(squares < (double)INFINITY))                                                          \
            return (real)NAN;                                                                       \
        return (real)(n == 0 ? 0 : n < smallest ? smallest : n > largest ? largest : n);            \
    }                                                                                               \
    CODEC_INLINE real qsgd_##real##_scale(real norm, int levels)                                    \
    {                                                                                               \
        return norm > 0 ? (real)(levels / (double)norm) : 0;                                        \
    }                                                                                               \
    /* |q| */                                                                                       \
    CODEC_INLINE real qsgd_##real##_quantize(real magnitude, real scale, int levels, float u)       \
    {                                                                                               \
        const real q = floor_real(magnitude * scale + u);                                           \
        return q < levels ? q : levels;                                                             \
    }                                                                                               \
    CODEC_INLINE real qsgd_##real##_dequantize(real q, real step, real norm)                        \
    {                                                                                               \
        return q * step * norm;                                                                     \
    }
QSGD_ARITHMETIC(float, floorf, 0x1p126)
QSGD_ARITHMETIC(double, floor, 0x1p1022)
