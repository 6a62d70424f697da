// Sums whose order is defined, so that every processor gets the same bits: CODEC_SUMS partial sums in double, part j
// over the elements i = j mod CODEC_SUMS in rising order, then part j plus part j + w for w = 8, 4, 2, 1.
// A float32, float16 or bfloat16 is a double exactly, and so is its square: the sum is finite if and only if they all
// are.
#ifndef BHVD_KERNEL_CODEC_SUMS_H
#define BHVD_KERNEL_CODEC_SUMS_H

#include "kernel/codec.h"

enum { CODEC_SUMS = 16 };

CODEC_INLINE double codec_sums_total(double parts[CODEC_SUMS])
{
    for (int w = CODEC_SUMS / 2; w > 0; w /= 2)
        for (int j = 0; j < w; j++)
            parts[j] += parts[j + w];
    return parts[0];
}

#endif
