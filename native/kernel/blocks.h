// Codecs block8, block4 and float8: elements in blocks, each with its own scale t, so that large numbers reduce the precision of
// their own block only. The arithmetic is shared by all processors.
//
//     L = 127 (block8), 7 (block4), 448 (float8)     t = max |x| / L over a block        s = 1 / t
//
//     block8, block4    encode: q = sign(x) min(round(|x| s), L)                         decode: x' = q t
//     float8            encode: c = x s as a float of 4 bits of exponent and 3 of mantissa (e4m3), to nearest even
//                       decode: x' = value(c) t
//
// round is rint, to nearest even, or with options.stochastic floor(r + u), u = codec_uniform(seed, i), i the index in the chunk
// (codec_random.h): E x' = x within 2^-17 t and rounding. float8 ignores it. An exact 0 decodes to exactly 0. |x' - x| <= t/2
// (stochastic: t) plus rounding; float8: 2^-4 |x|, or 2^-10 t if that is more. Decoded elements are always within the range of the
// element type.
//
// real is float for float32, float16 and bfloat16, double for float64. t and s are computed in double, then rounded; t is at least
// 2^-126 (double: 2^-1022) unless 0, so that t and s are normal numbers. NaN or infinity in a block: t is NaN, the whole block
// decodes to NaN. Other blocks are unaffected.
//
// Elements of a block: options.parameter, 64, 128, 256 or 512; the last block may be shorter.
//
// Sources: blocks as in qgZ and qwZ of ZeRO++, Wang et al., arXiv:2306.10209, and LoCo, Xie et al., arXiv:2407.04480; float8 as
// in Micikevicius et al., arXiv:2209.05433 (no infinities).
//
// Code layout (codec.h): a header, then t of each block, float32 or float64, then zeros up to a multiple of 32 bytes, then each
// element's code, then zeros up to a multiple of 32 bytes. 8 bits: a byte each: q as int8; or sign, exponent and mantissa.
// 4 bits: 16 bytes for every 32 elements: byte j holds q of element j below, of j + 16 above; negative ones in two's complement.
#pragma once

#include <stdbool.h>

#include "kernel/codec_random.h"
#include "kernel/element.h"

enum {
    BLOCKS_VERSION = 1,
    BLOCKS_DEFAULT = 256,               // elements of a block
    BLOCKS_SMALLEST = 64,
    BLOCKS_LARGEST = 512,
    BLOCKS_GROUP = 32,                  // elements whose 4-bit codes are stored together
    E4M3_MANTISSA = 3,                  // bits
    E4M3_BIAS = 7                       // of the exponent
};

// A block format.
struct blocks_format {
    bool is_float;
    int bits, levels;
};

static const struct blocks_format BLOCKS_8 = {false, 8, 127}, BLOCKS_4 = {false, 4, 7}, BLOCKS_E4M3 = {true, 8, 448};

// For each codec: its number, its name in functions, its format.
#define BLOCKS_EACH(of)                             \
    of(BHVD_CODEC_BLOCK8, block8, BLOCKS_8)         \
    of(BHVD_CODEC_BLOCK4, block4, BLOCKS_4)         \
    of(BHVD_CODEC_FLOAT8, float8, BLOCKS_E4M3)

// Elements of a block; 0: the parameter is out of range.
CODEC_INLINE size_t blocks_size(double parameter)
{
    if (parameter == 0)
        return BLOCKS_DEFAULT;
    for (size_t size = BLOCKS_SMALLEST; size <= BLOCKS_LARGEST; size *= 2)
        if (parameter == (double)size)
            return size;
    return 0;
}

// Bytes of the scales, with their padding, and of the codes.
CODEC_INLINE size_t blocks_scales_size(size_t count, size_t size, size_t real_size)
{
    return codec_padded((count / size + (count % size != 0)) * real_size);
}

CODEC_INLINE size_t blocks_codes_size(const struct blocks_format *format, size_t count)
{
    return codec_padded(format->bits == 8 ? count : (count + BLOCKS_GROUP - 1) / BLOCKS_GROUP * (BLOCKS_GROUP / 2));
}

// The nearest float8 to y, ties to even; requires that |y| does not round above the largest.
CODEC_INLINE uint8_t blocks_float_code(float y)
{
    const uint32_t bits = bits_from_float(y), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    const int dropped = 23 - E4M3_MANTISSA;
    if (magnitude < (uint32_t)(128 - E4M3_BIAS) << 23)          // subnormal: a whole multiple of 2^(1 - bias - mantissa)
        return (uint8_t)(sign | (uint32_t)rintf(float_from_bits(magnitude) *
                                                float_from_bits((uint32_t)(126 + E4M3_BIAS + E4M3_MANTISSA) << 23)));
    const uint32_t narrow = magnitude - ((uint32_t)(127 - E4M3_BIAS) << 23);
    return (uint8_t)(sign | (narrow + (1u << (dropped - 1)) - 1 + (narrow >> dropped & 1)) >> dropped);
}

// The value of a code, divided by BLOCKS_FLOAT_SCALE; it fits in a float16. Codes that no encoder writes get the float16's value.
CODEC_INLINE float blocks_float_value(uint8_t code)
{
    return float16_to_float((uint16_t)((code & 0x80) << 8 | (code & 0x7f) << (10 - E4M3_MANTISSA)));
}

#define BLOCKS_FLOAT_SCALE 256          // 2^(15 - bias)

#define BLOCKS_ARITHMETIC(real, rint_real, floor_real, smallest)                                                  \
    struct blocks_##real##_grid {                                                                                 \
        real s, t;                                  /* s = 0: all codes of the block are 0 */                     \
    };                                                                                                            \
    /* a: max |x|, a NaN where an element is not finite */                                                        \
    CODEC_INLINE struct blocks_##real##_grid blocks_##real##_grid_of(const struct blocks_format *format, real a)  \
    {                                                                                                             \
        const double t = (double)a / format->levels, step = t < (smallest) ? (smallest) : t;                      \
        struct blocks_##real##_grid none = {0, a == a ? 0 : (real)NAN}, grid = {(real)(1 / step), (real)step};    \
        return a > 0 ? grid : none;                                                                               \
    }                                                                                                             \
    CODEC_INLINE real blocks_##real##_rounded(real r, int stochastic, float u)                                    \
    {                                                                                                             \
        return stochastic ? floor_real(r + u) : rint_real(r);                                                     \
    }                                                                                                             \
    CODEC_INLINE real blocks_##real##_bounded(real x, real least, real most)                                      \
    {                                                                                                             \
        return x < least ? least : x > most ? most : x;                                                           \
    }
BLOCKS_ARITHMETIC(float, rintf, floorf, 0x1p-126)
BLOCKS_ARITHMETIC(double, rint, floor, 0x1p-1022)
