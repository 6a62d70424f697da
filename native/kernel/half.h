// Codecs float16 and bfloat16: each element rounded to a 16-bit float, to nearest even. Too large a number becomes an
// infinity, infinities stay, a NaN stays one. A float64 is rounded once, not by way of float32.
//
// Wire: the elements, without a header; an empty chunk is no bytes.
#pragma once

#include "kernel/element.h"

// x as float32, rounded to odd: cut off, and the last bit set if that lost anything. Rounding it again, to fewer bits,
// gives what rounding x gives.
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
