// Codecs float16 and bfloat16: each element rounded to a 16-bit float, to nearest even. Numbers that are too large become
// infinities; infinities and NaNs are kept. A float64 is rounded once, not through float32.
//
// Wire: the elements, without a header; an empty chunk has no bytes.
#pragma once

#include "kernel/element.h"

// x as float32, rounded to odd: truncated, with the last bit set if that was inexact. Rounding the result to fewer bits equals
// rounding x directly.
CODEC_INLINE float half_odd_float(double x)
{
    const float nearest = (float)x;
    if (nearest != nearest || (double)nearest == x)
        return nearest;
    uint32_t bits = bits_from_float(nearest);
    bits -= fabs((double)nearest) > fabs(x);
    return float_from_bits(bits | 1);
}

CODEC_INLINE float load_odd_f64(const void *p) { return half_odd_float(load_f64(p)); }
CODEC_INLINE void store_wide_f64(void *p, float x) { store_f64(p, x); }
