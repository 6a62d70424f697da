// Codecs block8, block4, block8_minmax, block4_minmax, float8_e4m3 and float8_e5m2: elements in blocks, each with a scale t of
// its own, so that large numbers in one block cost no other block its precision. The arithmetic, once for every processor.
//
//     a = max |x|, mn = min x, mx = max x over a block; mn and mx are never -0.0
//
//     block8, block4                L = 127, 7         t = a / L        s = 1 / t
//         encode: q = sign(x) min(round(|x| s), L)                      decode: x' = q t
//     block8_minmax, block4_minmax  L = 255, 15        t = (mx - mn) / L        s = 1 / t        lb = rint(mx s) - L
//         stochastic:                                  t = (mx - mn) / (L - 1)  s = 1 / t        lb = ceil(mx s) - L
//         encode: q = min(max(round(x s) - lb, 0), L)                   decode: x' = (q + lb) t
//         mx = mn: t = mn, lb = 1, all q are 0: the block is exact
//     float8_e4m3, float8_e5m2      L = 448, 57344     t = a / L        s = 1 / t
//         encode: c = x s as such a float, to nearest even              decode: x' = value(c) t
//
// round is rint, to nearest even, or with options.stochastic floor(r + u), with minmax, of which r may be large,
// floor(r) + [u < r - floor(r)]; u = codec_uniform(seed, i), i the index in the chunk (codec_random.h): E x' = x within 2^-17 t
// and rounding. float8 ignores it. An exact 0 comes back as exactly 0, where
// mn <= 0 <= mx. |x' - x| <= t/2 (stochastic: t) plus rounding; the float8 ones: 2^-4 |x| (2^-3 |x|), or 2^-10 t (2^-17 t) if
// that is more. Decoded elements never leave the numbers of the element type.
//
// real is float for float32, float16 and bfloat16, double for float64. t and s are computed in double, then rounded; t is at
// least 2^-126 (double: 2^-1022) unless 0, so that t and s are normal numbers. NaN or infinity in a block: t is NaN, the whole
// block decodes to NaN. The others do not suffer.
//
// Elements of a block: options.parameter, 64, 128, 256 or 512; the last block may be shorter.
//
// Sources: blocks as in qgZ and qwZ of ZeRO++, Wang et al., arXiv:2306.10209, and LoCo, Xie et al., arXiv:2407.04480; float8 as
// in Micikevicius et al., arXiv:2209.05433 (e4m3: no infinities). Differs: min-max levels are whole multiples of t, as in
// minmax_uint8.h.
//
// Wire (see codec.h): a header, then for each block t, with minmax t and lb, float32 or float64, then zeros up to a multiple of
// 32 bytes, then the codes of each element, then zeros up to a multiple of 32 bytes. 8 bits: a byte each: q as int8, with minmax
// uint8; or sign, exponent and mantissa. 4 bits: 16 bytes for every 32 elements: byte j holds q of element j below, of j + 16
// above; negative ones in two's complement.
#ifndef BHVD_KERNEL_BLOCKS_H
#define BHVD_KERNEL_BLOCKS_H

#include "kernel/codec_random.h"
#include "kernel/element.h"

enum {
    BLOCKS_VERSION = 1,
    BLOCKS_DEFAULT = 256,               // elements of a block
    BLOCKS_SMALLEST = 64,
    BLOCKS_LARGEST = 512,
    BLOCKS_GROUP = 32                   // elements whose 4-bit codes lie together
};

enum blocks_code { BLOCKS_SIGNED, BLOCKS_RANGE, BLOCKS_FLOAT };

// One of the six. BLOCKS_FLOAT: `mantissa` bits, and the exponent's bias.
struct blocks_format {
    enum blocks_code code;
    int bits, levels, mantissa, bias;
};

static const struct blocks_format BLOCKS_8 = {BLOCKS_SIGNED, 8, 127, 0, 0}, BLOCKS_4 = {BLOCKS_SIGNED, 4, 7, 0, 0},
                                  BLOCKS_8_MINMAX = {BLOCKS_RANGE, 8, 255, 0, 0},
                                  BLOCKS_4_MINMAX = {BLOCKS_RANGE, 4, 15, 0, 0},
                                  BLOCKS_E4M3 = {BLOCKS_FLOAT, 8, 448, 3, 7}, BLOCKS_E5M2 = {BLOCKS_FLOAT, 8, 57344, 2, 15};

// Each of the codecs: its number, the name of its functions, its format.
#define BLOCKS_EACH(of)                                                 \
    of(BHVD_CODEC_BLOCK8, block8, BLOCKS_8)                             \
    of(BHVD_CODEC_BLOCK4, block4, BLOCKS_4)                             \
    of(BHVD_CODEC_BLOCK8_MINMAX, block8_minmax, BLOCKS_8_MINMAX)        \
    of(BHVD_CODEC_BLOCK4_MINMAX, block4_minmax, BLOCKS_4_MINMAX)        \
    of(BHVD_CODEC_FLOAT8_E4M3, float8_e4m3, BLOCKS_E4M3)                \
    of(BHVD_CODEC_FLOAT8_E5M2, float8_e5m2, BLOCKS_E5M2)

// Elements of a block, or 0 when the parameter is out of range.
CODEC_INLINE size_t blocks_size(double parameter)
{
    if (parameter == 0)
        return BLOCKS_DEFAULT;
    for (size_t size = BLOCKS_SMALLEST; size <= BLOCKS_LARGEST; size *= 2)
        if (parameter == (double)size)
            return size;
    return 0;
}

// Numbers of the type `real` for each block: t, or t and lb.
CODEC_INLINE size_t blocks_numbers(const struct blocks_format *format) { return format->code == BLOCKS_RANGE ? 2 : 1; }

// Bytes of the scales, with their padding, and of the codes.
CODEC_INLINE size_t blocks_scales_size(const struct blocks_format *format, size_t count, size_t size, size_t real_size)
{
    return codec_padded((count / size + (count % size != 0)) * blocks_numbers(format) * real_size);
}

CODEC_INLINE size_t blocks_codes_size(const struct blocks_format *format, size_t count)
{
    return codec_padded(format->bits == 8 ? count : (count + BLOCKS_GROUP - 1) / BLOCKS_GROUP * (BLOCKS_GROUP / 2));
}

// A float of the format nearest to y, even among two; |y| rounds to no more than its largest number.
CODEC_INLINE uint8_t blocks_float_code(const struct blocks_format *format, float y)
{
    const uint32_t bits = bits_from_float(y), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    const int dropped = 23 - format->mantissa;
    if (magnitude < (uint32_t)(128 - format->bias) << 23)       // subnormal: a whole multiple of 2^(1 - bias - mantissa)
        return (uint8_t)(sign | (uint32_t)rintf(float_from_bits(magnitude) *
                                                float_from_bits((uint32_t)(126 + format->bias + format->mantissa) << 23)));
    const uint32_t narrow = magnitude - ((uint32_t)(127 - format->bias) << 23);
    return (uint8_t)(sign | (narrow + (1u << (dropped - 1)) - 1 + (narrow >> dropped & 1)) >> dropped);
}

// Its value, divided by blocks_float_unit: a float16 has all of them. What no encoder writes is what that is as a float16.
CODEC_INLINE float blocks_float_value(const struct blocks_format *format, uint8_t code)
{
    return float16_to_float((uint16_t)((code & 0x80) << 8 | (code & 0x7f) << (10 - format->mantissa)));
}

CODEC_INLINE float blocks_float_unit(const struct blocks_format *format)
{
    return format->bias == 15 ? 1 : 256;                        // 2^(15 - bias)
}

#define BLOCKS_ARITHMETIC(real, rint_real, floor_real, ceil_real, smallest)                                       \
    struct blocks_##real##_grid {                                                                                 \
        real s, t, lb;                              /* s = 0: all codes of the block are 0 */                     \
    };                                                                                                            \
    /* From t, at least 0. */                                                                                     \
    CODEC_INLINE struct blocks_##real##_grid blocks_##real##_steps(double t)                                      \
    {                                                                                                             \
        const double step = t < (smallest) ? (smallest) : t;                                                      \
        struct blocks_##real##_grid grid = {(real)(1 / step), (real)step, 0};                                     \
        return grid;                                                                                              \
    }                                                                                                             \
    /* a: max |x|, a NaN where an element is not finite */                                                        \
    CODEC_INLINE struct blocks_##real##_grid blocks_##real##_largest(const struct blocks_format *format, real a)  \
    {                                                                                                             \
        struct blocks_##real##_grid none = {0, a == a ? 0 : (real)NAN, 0};                                        \
        return a > 0 ? blocks_##real##_steps((double)a / format->levels) : none;                                  \
    }                                                                                                             \
    CODEC_INLINE struct blocks_##real##_grid blocks_##real##_range(const struct blocks_format *format, real mn,   \
                                                                   real mx, int stochastic)                       \
    {                                                                                                             \
        struct blocks_##real##_grid grid = {0, mn == mn ? mn : (real)NAN, 1};                                     \
        if (!(mx > mn))                                                                                           \
            return grid;                                                                                          \
        /* half the range, because the range of doubles may overflow */                                           \
        grid = blocks_##real##_steps((0.5 * mx - 0.5 * mn) / (0.5 * (format->levels - (stochastic != 0))));       \
        grid.lb = (stochastic ? ceil_real(mx * grid.s) : rint_real(mx * grid.s)) - (real)format->levels;          \
        return grid;                                                                                              \
    }                                                                                                             \
    CODEC_INLINE real blocks_##real##_rounded(real r, int stochastic, float u)                                    \
    {                                                                                                             \
        return stochastic ? floor_real(r + u) : rint_real(r);                                                     \
    }                                                                                                             \
    CODEC_INLINE real blocks_##real##_large_rounded(real r, int stochastic, float u)                              \
    {                                                                                                             \
        const real l = floor_real(r);                                                                             \
        return stochastic ? l + (u < r - l) : rint_real(r);                                                       \
    }                                                                                                             \
    CODEC_INLINE real blocks_##real##_bounded(real x, real least, real most)                                      \
    {                                                                                                             \
        return x < least ? least : x > most ? most : x;                                                           \
    }
BLOCKS_ARITHMETIC(float, rintf, floorf, ceilf, 0x1p-126)
BLOCKS_ARITHMETIC(double, rint, floor, ceil, 0x1p-1022)

#endif
