// One element of each floating point type: load from and store to memory of any alignment, as float32 (float64: as
// double). float16 and bfloat16 are integer bit arithmetic, exact, equal to F16C and to the versions in vectors.h:
// round to nearest even, subnormals kept, a NaN keeps its sign and leading payload and becomes quiet when narrowed.
// Plain C, also included by a CUDA file. NVRTC has no standard headers: build.py drops their include lines when it assembles the
// source, so the few names that are needed are declared here.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)
#endif

#ifdef __CUDACC__
#define CODEC_INLINE static __host__ __device__ inline
#define CODEC_CONSTANT static __constant__ const
#else
#define CODEC_INLINE static inline
#define CODEC_CONSTANT static const
#endif

// The NaN that a result contains, so that its bits do not depend on the order of operands.
CODEC_INLINE float canonical_nan(float x) { return x == x ? x : (float)NAN; }

CODEC_INLINE float float_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

CODEC_INLINE uint32_t bits_from_float(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

CODEC_INLINE float float16_to_float(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff;
    if (magnitude > 0x7c00)                                     // NaN, quieted
        return float_from_bits(sign | 0x7fc00000 | magnitude << 13);
    if (magnitude == 0x7c00)
        return float_from_bits(sign | 0x7f800000);
    if (magnitude >= 0x0400)                                    // normal: the exponent's bias grows from 15 to 127
        return float_from_bits(sign | ((magnitude << 13) + ((127 - 15) << 23)));
    const float subnormal = (float)magnitude * 0x1p-24f;        // exact
    return sign ? -subnormal : subnormal;
}

CODEC_INLINE uint16_t float16_from_float(float x)
{
    const uint32_t bits = bits_from_float(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)                                 // NaN
        return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x03ff));
    if (magnitude >= 0x477ff000)                                // from 65520 on, halfway past the largest: infinity
        return (uint16_t)(sign | 0x7c00);
    if (magnitude >= 0x38800000) {                              // normal; a carry out of the mantissa is right too
        const uint32_t narrow = magnitude - ((127 - 15) << 23);
        return (uint16_t)(sign | (narrow + 0x0fff + (narrow >> 13 & 1)) >> 13);
    }
    if (magnitude < 0x33000000)                                 // below 2^-25, half the smallest subnormal
        return (uint16_t)sign;
    const uint32_t shift = 126 - (magnitude >> 23);             // 14 .. 24 bits are dropped
    const uint32_t mantissa = (magnitude & 0x007fffff) | 0x00800000;
    const uint32_t kept = mantissa >> shift, dropped = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
    return (uint16_t)(sign | (kept + (dropped > half || (dropped == half && (kept & 1)))));
}

// x as float32, rounded to odd: truncated, with the last bit set if that was inexact. Rounding the result to fewer bits equals
// rounding x directly.
CODEC_INLINE float float_rounded_to_odd(double x)
{
    const float nearest = (float)x;
    if (nearest != nearest || (double)nearest == x)
        return nearest;
    uint32_t bits = bits_from_float(nearest);
    bits -= fabs((double)nearest) > fabs(x);
    return float_from_bits(bits | 1);
}

CODEC_INLINE float bfloat16_to_float(uint16_t h) { return float_from_bits((uint32_t)h << 16); }

CODEC_INLINE uint16_t bfloat16_from_float(float x)
{
    const uint32_t bits = bits_from_float(x);
    if (x != x)
        return (uint16_t)(bits >> 16 | 0x0040);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

CODEC_INLINE float load_f32(const void *p)
{
    float x;
    memcpy(&x, p, sizeof x);
    return x;
}

CODEC_INLINE void store_f32(void *p, float x) { memcpy(p, &x, sizeof x); }

CODEC_INLINE double load_f64(const void *p)
{
    double x;
    memcpy(&x, p, sizeof x);
    return x;
}

CODEC_INLINE void store_f64(void *p, double x) { memcpy(p, &x, sizeof x); }

CODEC_INLINE float load_f16(const void *p)
{
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return float16_to_float(h);
}

CODEC_INLINE void store_f16(void *p, float x)
{
    const uint16_t h = float16_from_float(x);
    memcpy(p, &h, sizeof h);
}

CODEC_INLINE float load_bf16(const void *p)
{
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return bfloat16_to_float(h);
}

CODEC_INLINE void store_bf16(void *p, float x)
{
    const uint16_t h = bfloat16_from_float(x);
    memcpy(p, &h, sizeof h);
}
