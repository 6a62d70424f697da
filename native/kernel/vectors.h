// What loops over vectors share, whatever the instruction set. vectors_<isa>.h includes this, having defined ISA and,
// for a vector `vec` of LANES floats: vec_load, vec_store, vec_stream (aligned), vec_set1, vec_add, vec_sub, vec_mul,
// vec_rint, vec_floor, vec_abs, vec_min, vec_max, vec_canonical (NaNs);
//     vec_nans, VEC_NANS_NONE, vec_nans_add(nans, a, b), vec_nans_any    whether any of the vectors added held a NaN
//     vec_less(a, b)           bit i: a < b in lane i
//     vec_negate(x, bits)      the sign of lane i flipped where bit i is set
//     vec_select(x, bits)      lane i, or 0 where bit i is not set
//     vec_uniform(key, i)      codec_uniform of i, i + 1, ...
//     wide, WIDE_ZERO, wide_low(x), wide_high(x), wide_add, wide_mul, wide_store    half the lanes as doubles
// and for each element type f32, f16, bf16 the vector functions of struct element below.
#ifndef BHVD_KERNEL_VECTORS_H
#define BHVD_KERNEL_VECTORS_H

#include <float.h>

#include "kernel/codec_sums.h"

enum {
    BLOCK = 32,                         // elements that the loops take at a time
    PREFETCH_BYTES = 8192,              // ahead of the block in work; past the end of the source it does no harm
    STREAM_COUNT = 4 << 20              // elements, from which on results bypass the caches
};

// Asks for the cache lines of the block PREFETCH_BYTES ahead.
INLINE void prefetch_block(const char *block, size_t size)
{
    for (size_t line = 0; line < BLOCK * size; line += 64)
        _mm_prefetch(block + PREFETCH_BYTES + line, _MM_HINT_T0);
}

// An element type: its vectors, and one element for the header.
struct element {
    size_t size;
    float largest;                              // number
    vec (*load)(const void *p);
    void (*store_two)(void *p, vec a, vec b);   // finite numbers, one vector after the other
    vec (*round)(vec x);                        // finite numbers rounded to the element type, still as float32
    float (*load_one)(const void *p);
    void (*store_one)(void *p, float x);
};
static const struct element f32 = {4, FLT_MAX, vec_load, vec_store_two_f32, vec_round_f32, load_f32, store_f32};
static const struct element f16 = {2, 65504, vec_load_f16, vec_store_two_f16, vec_round_f16, load_f16, store_f16};
static const struct element bf16 = {2, 0x1.fep127f, vec_load_bf16, vec_store_two_bf16, vec_round_bf16,
                                    load_bf16, store_bf16};

// The last count < BLOCK elements, filled up to a block with zeros.
INLINE void tail_zeros(char *block, const char *src, size_t count, size_t size)
{
    memcpy(block, src, count * size);
    memset(block + count * size, 0, (BLOCK - count) * size);
}

// The CODEC_SUMS partial sums of codec_sums.h, side by side.
struct sums {
    wide part[2 * CODEC_SUMS / LANES];
};

INLINE void sums_init(struct sums *sums)
{
    for (int p = 0; p < 2 * CODEC_SUMS / LANES; p++)
        sums->part[p] = WIDE_ZERO;
}

INLINE wide wide_magnitude(wide x, int squares)
{
    return squares ? wide_mul(x, x) : x;
}

// Adds |x|, or x^2, of a block's vector number v.
INLINE void sums_add(struct sums *sums, int v, vec x, int squares)
{
    wide *part = &sums->part[2 * v % (2 * CODEC_SUMS / LANES)];
    part[0] = wide_add(part[0], wide_magnitude(wide_low(vec_abs(x)), squares));
    part[1] = wide_add(part[1], wide_magnitude(wide_high(vec_abs(x)), squares));
}

// codec_sums_total: added as vectors until one is left.
INLINE double sums_total(struct sums sums)
{
    double parts[LANES / 2];
    for (int w = CODEC_SUMS / LANES; w > 0; w /= 2)
        for (int p = 0; p < w; p++)
            sums.part[p] = wide_add(sums.part[p], sums.part[p + w]);
    wide_store(parts, sums.part[0]);
    for (int w = LANES / 4; w > 0; w /= 2)
        for (int j = 0; j < w; j++)
            parts[j] += parts[j + w];
    return parts[0];
}

#endif
