// Codecs rotated1 to rotated4: a randomized Hadamard transform makes the elements of a block nearly normal, whatever their
// distribution, and each coefficient becomes one of 2^bits levels. No state is kept from step to step.
//
//     y = H (d x) / D                       for a block of D elements, D a power of two; d: random signs; H: Hadamard, +-1
//     s = sqrt(mean_i y_i^2)                q_i = [number of thresholds T s below |y_i|], and the sign of y_i
//     t = sum_i y_i^2 / sum_i |y_i| L[q_i]
//     z_i = sign(y_i) L[q_i] t              x' = d (H z)
//
// L and T are the Lloyd-Max levels and thresholds of a standard normal. t makes <z, y> = <y, y>, so that the mean of x' over the
// signs is nearly x; for the bias if a few elements of a block are far larger than the others see tests/kernels/test_rotated.py.
//
// Codes with equal keys have equal signs d, so their z may be added: a mean of many codes needs one inverse transform, and none if
// it is encoded again (struct kernel_transform). The key is the seed; it is in the header, so decoding needs no seed.
//
// Signs: bit i mod 32 of word floor(i / 32) is the sign of element i of the segment, 1: negative. For the words see codec.h.
//
// All arithmetic is in float32, for float64 too, in the same order on every processor: H by stages of butterflies (a + b, a - b) of
// distance 1, 2, 4, ... D / 2; sums as ROTATED_SUMS partial sums, part j over the elements i = j mod ROTATED_SUMS in rising order,
// then part j plus part j + w for w = 32, 16, ... 1. If the sum of squares leaves ROTATED_SQUARES_MIN .. MAX, y is multiplied by a
// power of two, and t divided by it: |y| is then below 2 and the largest at least 1.
//
// NaN or infinity in a block, or elements so large that its transform or t is beyond ROTATED_LARGEST: t is NaN, the whole block
// decodes to NaN. Other blocks are unaffected. A block of zeros: t is 0, and it decodes to zeros; other zeros do not stay exactly
// 0. A float16 beyond the largest number becomes that number.
//
// Sources: DRIVE, Vargaftik et al., arXiv:2105.08339; EDEN, arXiv:2108.08842; sums of levels under one rotation: THC, Li et al.,
// arXiv:2302.08545. Differs: THC's ranks agree on a range; here each block of each rank has its own t.
//
// Elements of a block: options.parameter, 256, 512, 1024 or 2048. The last block has the smallest power of two, from 256 on, that
// holds the rest, padded with zeros.
//
// Code layout (codec.h): a header, then t for each block, float32, then zeros up to a multiple of 32 bytes, then the blocks' codes.
//     0..7: the key
// Each 256 elements are `bits` parts of 32 bytes: 16 words of 16 bits. A part of b-bit numbers holds 256 / b elements: element 16 k
// + j in the bits from b k on of word j. Numbers: q, with the sign above it. 3 bits: q in two parts of 2 bits each, then the signs
// in one of 1 bit.
// Plain C, also included by a CUDA file.
#pragma once

#include "kernel/codec.h"

enum {
    ROTATED_VERSION = 1,
    ROTATED_DEFAULT = 512,              // elements of a block
    ROTATED_SMALLEST = 256,
    ROTATED_LARGEST_BLOCK = 2048,
    ROTATED_SUMS = 64,
    ROTATED_PACK = 256,                 // elements whose codes are packed together: `bits` parts
    ROTATED_PART = 32                   // bytes
};

#define ROTATED_SQUARES_MIN 0x1p-80f
#define ROTATED_SQUARES_MAX 0x1p100f
#define ROTATED_LARGEST 0x1p100f        // t: decoding cannot overflow

// The levels for a number of bits; threshold[q] is between the levels q and q + 1.
struct rotated_levels {
    int bits;
    float level[8], threshold[7];
};

CODEC_CONSTANT struct rotated_levels ROTATED_LEVELS[] = {
    {1, {0.7978845608f}, {0}},
    {2, {0.4527800346f, 1.5104176085f}, {0.9815988216f}},
    {3, {0.2450941790f, 0.7560052813f, 1.3439092785f, 2.1519457045f}, {0.5005497301f, 1.0499572799f, 1.7479274915f}},
    {4, {0.1283950299f, 0.3880482995f, 0.6567591185f, 0.9423404565f, 1.2562311973f, 1.6180463860f, 2.0690172265f, 2.7325895710f},
     {0.2582216647f, 0.5224037090f, 0.7995497875f, 1.0992858271f, 1.4371387917f, 1.8435318063f, 2.4008033988f}}};

// For each codec: its number, its name in functions, its levels.
#define ROTATED_EACH(of)                                    \
    of(BHVD_CODEC_ROTATED1, rotated1, ROTATED_LEVELS[0])    \
    of(BHVD_CODEC_ROTATED2, rotated2, ROTATED_LEVELS[1])    \
    of(BHVD_CODEC_ROTATED3, rotated3, ROTATED_LEVELS[2])    \
    of(BHVD_CODEC_ROTATED4, rotated4, ROTATED_LEVELS[3])

// Elements of a block; 0: the parameter is out of range.
CODEC_INLINE size_t rotated_size(double parameter)
{
    if (parameter == 0)
        return ROTATED_DEFAULT;
    for (size_t size = ROTATED_SMALLEST; size <= ROTATED_LARGEST_BLOCK; size *= 2)
        if (parameter == (double)size)
            return size;
    return 0;
}

// D of a block if `left` elements, at least one, are left to encode.
CODEC_INLINE size_t rotated_block(size_t left, size_t size)
{
    size_t d = ROTATED_SMALLEST;
    if (left >= size)
        return size;
    while (d < left)
        d *= 2;
    return d;
}

// Number of coefficients: the elements and the padding of the last block.
CODEC_INLINE size_t rotated_count(size_t count, size_t size)
{
    return count / size * size + (count % size ? rotated_block(count % size, size) : 0);
}

CODEC_INLINE size_t rotated_scales_size(size_t count, size_t size)
{
    return codec_padded((count / size + (count % size != 0)) * sizeof(float));
}

CODEC_INLINE size_t rotated_codes_size(int bits, size_t count, size_t size)
{
    return rotated_count(count, size) / 8 * (size_t)bits;
}

// The signs of the D elements from `begin` on, as words.
CODEC_INLINE void rotated_signs(uint32_t *words, uint64_t seed, size_t begin, size_t d)
{
    const struct codec_key key = codec_key(seed, 0);
    for (size_t w = 0; w < d / 32; w++)
        words[w] = codec_word(key, (uint32_t)(begin / 32 + w));
}

CODEC_INLINE int rotated_is_regular(float squares)
{
    return squares >= ROTATED_SQUARES_MIN && squares <= ROTATED_SQUARES_MAX;
}

// Converts t, computed in double; too large: NaN.
CODEC_INLINE float rotated_scale(double t) { return t <= ROTATED_LARGEST ? (float)t : (float)NAN; }

// Whether a coefficient, or t, is small enough that decoding cannot overflow.
CODEC_INLINE int rotated_is_bounded(float z) { return z >= -ROTATED_LARGEST && z <= ROTATED_LARGEST; }

CODEC_INLINE uint64_t rotated_key(const void *code)
{
    uint64_t key;
    memcpy(&key, code, sizeof key);
    return key;
}

// The power of two that scales a float, greater than 0, into [1, 2).
CODEC_INLINE double rotated_factor(float largest)
{
    const double wide = largest;
    uint64_t bits;
    double factor;
    memcpy(&bits, &wide, sizeof bits);
    bits = (2046 - (bits >> 52)) << 52;
    memcpy(&factor, &bits, sizeof factor);
    return factor;
}
