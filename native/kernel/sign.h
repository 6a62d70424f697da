// Codecs sign and sign_rms: one bit for each element, its sign, and one scale a for the segment of d elements.
//
//     sign:      a = ||x||_1 / d             sign_rms:    a = ||x||_2 / sqrt(d)
//     decode:    x' = a where x >= 0, -a where x < 0          (0 and -0 count as positive)
//
// Both are biased: use them with error feedback. The norm is summed in double in the order of codec.h, divided in
// double and rounded once, to float32 (float64 elements: double). A NaN or infinity in a segment, or a float64 sum beyond
// the largest double, makes a = NaN and all bits 0: the whole segment decodes to NaN.
//
// Sources: sign, EF-signSGD, Karimireddy et al., arXiv:1901.09847; sign_rms, 1-bit Adam, Tang et al., arXiv:2102.02888.
//
// Code layout (codec.h): a header, then the bits, element i at bit i mod 8 of byte i / 8, 1 for negative, then zeros up to
// a multiple of 32 bytes.
//     0: a, float32 or float64
#pragma once

#include <math.h>

#include "kernel/codec.h"

enum { SIGN_VERSION = 2 };

CODEC_INLINE size_t sign_bits_size(size_t count) { return codec_padded(count / 8 + (count % 8 != 0)); }

// The scale as a double; total: sum of |x|, or with squares of x^2. NaN if the total is not finite.
CODEC_INLINE double sign_scale(double total, size_t count, int squares)
{
    if (!(total < (double)INFINITY))
        return (double)NAN;
    if (count == 0)
        return 0;
    return squares ? sqrt(total / (double)count) : total / (double)count;
}
