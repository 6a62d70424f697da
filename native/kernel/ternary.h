// Codec ternary: each element as -s, 0 or s, at random so that the mean is the element (TernGrad).
//
//     s = max |x|        encode: b = 1 where u s < |x|, else 0        decode: x' = s sign(x) b
//
// u is codec_uniform(seed, i), see codec_random.h: P(b = 1) = |x| / s within 2^-17, so E x' = x. The product u s is
// rounded to float32 (float64 elements: double). A NaN or infinity in a chunk makes s = NaN: the whole chunk decodes to
// NaN.
//
// Source: TernGrad, Wen et al., arXiv:1705.07878. Differs: clipping, and a scale shared by the workers, are the
// caller's.
//
// Wire (see codec.h): a header, then 8 bytes for every 32 elements: the 32 bits b, then the 32 signs (1: x < 0 and b =
// 1), element i at bit i mod 32; then zeros up to a multiple of 32 bytes.
//     0: s, float32 or float64
#ifndef BHVD_KERNEL_TERNARY_H
#define BHVD_KERNEL_TERNARY_H

#include <math.h>

#include "kernel/codec_random.h"

enum {
    TERNARY_VERSION = 1,
    TERNARY_BLOCK = 32                  // elements
};

// Both halves of a block on the wire.
struct ternary_block {
    uint32_t kept, negative;
};

CODEC_INLINE size_t ternary_blocks_size(size_t count)
{
    return codec_padded((count / TERNARY_BLOCK + (count % TERNARY_BLOCK != 0)) * sizeof(struct ternary_block));
}

#define TERNARY_ARITHMETIC(real)                                                                   \
    CODEC_INLINE int ternary_##real##_is_kept(real magnitude, real s, float u)                     \
    {                                                                                              \
        return (real)u * s < magnitude;                                                            \
    }
TERNARY_ARITHMETIC(float)
TERNARY_ARITHMETIC(double)

#endif
