// Codec minmax_uint8: each element as one of 256 levels between the segment's least mn and largest mx. The arithmetic is shared by
// all processors: plain C, also included by a CUDA file (there -fmad=false, like -ffp-contract=off here).
//
//     s = 255 / (mx - mn)    ub = rint(mx s)    lb = ub - 255
//     encode: q = min(max(rint(x s), lb), ub) - lb
//     decode: x' = min(max((q + lb) t, mn), mx)    t = (mx - mn) / 255
//
// The levels are integer multiples of t, so an exact 0 decodes to exactly 0 if mn <= 0 <= mx. rint rounds to nearest even. |x' - x|
// <= 0.5 / s plus rounding, a few units in the last place of x; the clamp to [mn, mx] only reduces it.
// real is float for float32, float16 and bfloat16, double for float64; s and t are computed in double, then rounded.
//
// Source: MinMaxUInt8 of BAGUA, Gan et al., arXiv:2107.01499. Differs:
// - Both sides are clamped: in a symmetric segment rint(mx s) and rint(mn s) both round away from 0, and q would be -1.
// - No 1e-7 in the divisor, which erased segments of small numbers. Instead s is bounded by 2^126 (double: 2^1022), so
//   that s and t are normal numbers.
// - mx == mn: all codes are 0 and decode to mn.
// - NaN or infinity in a segment: mn and mx are stored as NaN, which makes it a constant segment of NaN.
// - Decoding multiplies by t instead of dividing by s, and never leaves [mn, mx]: it cannot overflow.
// - Levels beyond 2^24 (offset data: mx/(mx - mn) large) are no longer all floats; lb is rounded then, and q is clamped
//   to 0..255 after the subtraction, which for smaller levels is the same as clamping to lb..ub before it.
//
// Code layout (codec.h): a header, then count codes of one byte, then zeros up to a multiple of 32 bytes.
//     0: mn, as an element    sizeof(element): mx
// mn and mx are never -0.0. An empty segment is its header alone, with mn = mx = 0.
#pragma once

#include <math.h>

#include "kernel/codec.h"

enum { MINMAX_UINT8_VERSION = 2 };      // 1 is BAGUA's own formula

// Encode and decode for a segment that is not constant (mx > mn; test that first: NaN fails it).
//     real_grid         parameters from mn and mx
//     real_quantize     q as a whole number in `real`
//     real_dequantize   x' from q, 0 <= q <= 255
#define MINMAX_UINT8_ARITHMETIC(real, rint_real, scale_max)                                           \
    struct minmax_uint8_##real##_grid {                                                               \
        real s, t, lb, mn, mx;                                                                        \
    };                                                                                                \
    CODEC_INLINE struct minmax_uint8_##real##_grid minmax_uint8_##real##_grid(real mn, real mx) \
    {                                                                                                 \
        /* half the range, because the range of doubles may overflow */                               \
        const double half = 0.5 * mx - 0.5 * mn;                                                      \
        struct minmax_uint8_##real##_grid grid;                                                       \
        if (half * (scale_max) > 127.5) {                                                             \
            grid.s = (real)(127.5 / half);                                                            \
            grid.t = (real)(half / 127.5);                                                            \
        } else {                                                                                      \
            grid.s = (real)(scale_max);                                                               \
            grid.t = (real)(1 / (scale_max));                                                         \
        }                                                                                             \
        grid.lb = rint_real(mx * grid.s) - (real)255;                                                 \
        grid.mn = mn;                                                                                 \
        grid.mx = mx;                                                                                 \
        return grid;                                                                                  \
    }                                                                                                 \
    CODEC_INLINE real minmax_uint8_##real##_quantize(const struct minmax_uint8_##real##_grid *grid, real x) \
    {                                                                                                 \
        const real q = rint_real(x * grid->s) - grid->lb;                                             \
        return q < 0 ? 0 : q > 255 ? 255 : q;                                                         \
    }                                                                                                 \
    CODEC_INLINE real minmax_uint8_##real##_dequantize(const struct minmax_uint8_##real##_grid *grid, real q) \
    {                                                                                                 \
        const real x = (q + grid->lb) * grid->t;                                                      \
        return x < grid->mn ? grid->mn : x > grid->mx ? grid->mx : x;                                 \
    }
MINMAX_UINT8_ARITHMETIC(float, rintf, 0x1p126)
MINMAX_UINT8_ARITHMETIC(double, rint, 0x1p1022)
