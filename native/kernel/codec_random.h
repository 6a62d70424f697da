// The random numbers of the stochastic codecs: a function only of the seed and the element's index in its chunk, so that order,
// vectors and threads do not matter. Plain C, also included by a CUDA file.
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
#pragma once

#include "kernel/codec.h"

#define CODEC_RANDOM_MULTIPLIER_1 0x21f0aaadu
#define CODEC_RANDOM_MULTIPLIER_2 0x735a2d97u

// The key for 2^32 elements, from index on, a multiple of 2^32.
struct codec_key {
    uint32_t a, b;
};

CODEC_INLINE struct codec_key codec_key(uint64_t seed, uint64_t index)
{
    struct codec_key key;
    uint64_t z = seed + (1 + (index >> 32)) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    key.a = (uint32_t)z;
    key.b = (uint32_t)(z >> 32);
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
