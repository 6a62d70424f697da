// Common to all codecs: the header and padding of codes, sums, random numbers. Plain C, also included by a CUDA file.
//
// Code layout of a segment (segments.h): 32 bytes of header, then the codec's own content. The size of a code is
// bhvd_encoded_size, which both sides compute from codec, dtype, count and options. Numbers are little endian.
//     0..15: the codec's own, else 0    16: version    17: flags    18..31: the codec's own, else 0
// Codecs float16, bfloat16 and float32 have no header: their codes are the elements.
#pragma once

#include "kernel/element.h"
#include "kernel/segments.h"

enum {
    CODEC_HEADER = 32,                  // bytes
    CODEC_BLOCK = 32,                   // codes are padded with zeros to a multiple of this many bytes
    CODEC_VERSION_AT = 16,
    CODEC_FLAGS_AT = 17,
    CODEC_NONFINITE = 1                 // flag: the segment holds a NaN or an infinity
};

CODEC_INLINE size_t codec_padded(size_t nbytes) { return (nbytes + CODEC_BLOCK - 1) / CODEC_BLOCK * CODEC_BLOCK; }

// Initializes the common fields of the header; the caller then stores the codec's own.
CODEC_INLINE void codec_header_init(uint8_t *header, uint8_t version, int is_finite)
{
    memset(header, 0, CODEC_HEADER);
    header[CODEC_VERSION_AT] = version;
    header[CODEC_FLAGS_AT] = is_finite ? 0 : CODEC_NONFINITE;
}

// --------------------------------------------------------------------------------------------------------------- sums

// Sums in a defined order, so that every processor gets the same bits and many threads can take part. Elements are taken in blocks
// of CODEC_SUMS_BLOCK. The sum of a block is CODEC_SUMS partial sums in double, part j over the elements i = j mod CODEC_SUMS in
// rising order, then part j plus part j + w for w = 8, 4, 2, 1. The total is the sum of the blocks' sums, in the same order.
// A float32, float16 or bfloat16 is exact as a double, and so is its square: the sum is finite if and only if all elements are.
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

// ----------------------------------------------------------------------------------------------------- random numbers

// The random numbers of the stochastic codecs: a function only of the seed and the element's index in its segment, so that order,
// vectors and threads do not matter.
//
//     z = seed + (1 + floor(i / 2^32)) 0x9e3779b97f4a7c15       mod 2^64, then the finalizer of splitmix64:
//     z = (z ^ z >> 30) 0xbf58476d1ce4e5b9;  z = (z ^ z >> 27) 0x94d049bb133111eb;  z = z ^ z >> 31
//     a = z mod 2^32;  b = floor(z / 2^32)
//     x = w ^ a,  w = 16 floor(i / 32) + i mod 16               mod 2^32, from here on, i as well
//     x = (x ^ x >> 16) 0x21f0aaad;  x = (x ^ x >> 15 ^ b) 0x735a2d97;  x = x ^ x >> 15
//     h = x mod 2^16 where i mod 32 < 16, else floor(x / 2^16)
//     u = (2 h + 1) / 2^17                                      in (0, 1), of mean 1/2
//
// One word serves two elements, since computing words limits the speed of encoding; two vectors use the halves of the same words.
// 2^-17 of one of 127 levels is 2^-24 of the largest element: a float32 sum could not hold more bits.
//
// Sources: splitmix64, Steele, Lea and Flood, OOPSLA 2014; the multipliers and shifts of the 32-bit mix were found by Ettinger and
// others (hash-prospector). Differs: b is mixed in half way, so that sequences of different seeds are not shifts of each other. Not
// for cryptography.
#define CODEC_RANDOM_MULTIPLIER_1 0x21f0aaadu
#define CODEC_RANDOM_MULTIPLIER_2 0x735a2d97u

// The key for 2^32 elements, from index on, a multiple of 2^32.
struct codec_key {
    uint32_t a, b;
};

CODEC_INLINE struct codec_key codec_key(uint64_t seed, uint64_t index)
{
    const uint64_t z = segments_mix(seed, index >> 32);
    struct codec_key key = {(uint32_t)z, (uint32_t)(z >> 32)};
    return key;
}

// x for w.
CODEC_INLINE uint32_t codec_word(struct codec_key key, uint32_t w)
{
    uint32_t x = w ^ key.a;
    x = (x ^ x >> 16) * CODEC_RANDOM_MULTIPLIER_1;
    x = (x ^ x >> 15 ^ key.b) * CODEC_RANDOM_MULTIPLIER_2;
    return x ^ x >> 15;
}

CODEC_INLINE float codec_uniform(struct codec_key key, uint32_t index)
{
    const uint32_t x = codec_word(key, index >> 5 << 4 | (index & 15));
    return (float)((x >> (index & 16) & 0xffff) << 1 | 1) * 0x1p-17f;
}
