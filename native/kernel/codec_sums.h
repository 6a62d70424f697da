// Sums in a defined order, so that every processor gets the same bits and many threads can take part. Elements are taken in blocks
// of CODEC_SUMS_BLOCK. The sum of a block is CODEC_SUMS partial sums in double, part j over the elements i = j mod CODEC_SUMS in
// rising order, then part j plus part j + w for w = 8, 4, 2, 1. The total is the sum of the blocks' sums, in the same order.
// A float32, float16 or bfloat16 is exact as a double, and so is its square: the sum is finite if and only if all elements are.
#pragma once

#include "kernel/codec.h"

enum {
    CODEC_SUMS = 16,
    CODEC_SUMS_BLOCK = 512              // elements
};

CODEC_INLINE size_t codec_sums_blocks(size_t count)
{
    return count / CODEC_SUMS_BLOCK + (count % CODEC_SUMS_BLOCK != 0);
}

CODEC_INLINE double codec_sums_total(double parts[CODEC_SUMS])
{
    for (int w = CODEC_SUMS / 2; w > 0; w /= 2)
        for (int j = 0; j < w; j++)
            parts[j] += parts[j + w];
    return parts[0];
}
