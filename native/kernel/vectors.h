// What loops over vectors share, whatever the instruction set, for files that are compiled for each (build.py). vectors_<isa>.h defines, for a
// vector `vec` of LANES floats: vec_load, vec_store, vec_stream (aligned), vec_set1, vec_add, vec_sub, vec_mul,
// vec_rint, vec_abs, vec_min, vec_max, vec_canonical (NaNs);
//     vec_nans, VEC_NANS_NONE, vec_nans_add(nans, a, b), vec_nans_any    whether any of the vectors added held a NaN
//     vec_least(x), vec_greatest(x)    of the lanes, none of which is a NaN
//     vec_to_i8(q), vec_to_u8(q)       BLOCK small whole numbers as bytes; u8: clamped to 0..255
//     vec_truncated_to_i8(q)           the same of numbers without what is behind the point
//     vec_load_bytes(p)                LANES bytes; vec_from_i8(bytes), vec_from_u8(bytes): as numbers
//     vec_less(a, b)           bit i: a < b in lane i
//     vec_negate(x, bits)      the sign of lane i flipped where bit i is set
//     vec_uniforms(key, i, u)  codec_uniform of the BLOCK elements from i on, which is a multiple of BLOCK
//     vec_with_sign(m, x)      m, at least 0, with the sign of x
//     wide, WIDE_ZERO, wide_low(x), wide_high(x), wide_add, wide_store    half the lanes as doubles
//     wide_add_square(sum, x)  sum + x x, of which the product is exact: x comes from a float32
// and for each element type f32, f16, bf16 the vector functions of struct element below.
#pragma once

#include <float.h>

#include "kernel/codec_random.h"
#include "kernel/codec_sums.h"
#ifdef __AVX512F__
#include "kernel/vectors_avx512.h"
#else
#include "kernel/vectors_avx2.h"
#endif

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

// The last count % BLOCK elements, filled up to a block by repeating the first of them.
INLINE void tail_load(char *block, const char *src, size_t count, size_t size)
{
    memcpy(block, src, count * size);
    for (size_t i = count; i < BLOCK; i++)
        memcpy(block + i * size, src, size);
}

struct range {
    vec mn[2], mx[2];
    vec_nans nans;
};

// Two vectors, into accumulators of their own: so that one block does not wait for the one before.
INLINE void range_add(struct range *range, int which, vec a, vec b)
{
    range->mn[which] = vec_min(range->mn[which], vec_min(a, b));
    range->mx[which] = vec_max(range->mx[which], vec_max(a, b));
    // The minimum of two drops a NaN on one side, so NaNs are looked for apart; one comparison serves two vectors.
    range->nans = vec_nans_add(range->nans, a, b);
}

INLINE void range_add_block(struct range *range, const char *block, const struct element *element)
{
    const size_t stride = LANES * element->size;
    for (int v = 0; v < BLOCK / LANES; v += 2)
        range_add(range, v / 2 % 2, element->load(block + v * stride), element->load(block + (v + 1) * stride));
}

#define RANGE_NONE                                                                                                   \
    {{vec_set1(INFINITY), vec_set1(INFINITY)}, {vec_set1(-INFINITY), vec_set1(-INFINITY)}, VEC_NANS_NONE}

// The minimum and the maximum, never -0.0, or NaN for both when an element was not finite.
INLINE void range_end(const struct range *range, float *mn, float *mx)
{
    *mn = vec_least(vec_min(range->mn[0], range->mn[1]));
    *mx = vec_greatest(vec_max(range->mx[0], range->mx[1]));
    const int is_finite = !vec_nans_any(range->nans) && *mn >= -FLT_MAX && *mx <= FLT_MAX;
    *mn = is_finite ? *mn + 0 : (float)NAN;     // + 0 turns -0.0 into +0.0
    *mx = is_finite ? *mx + 0 : (float)NAN;
}

// Sets mn and mx to the elements' minimum and maximum, or both to NaN when an element is not finite.
INLINE void range_find(const char *src, size_t count, const struct element *element, float *mn, float *mx)
{
    struct range range = RANGE_NONE;
    size_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) {
        prefetch_block(src + i * element->size, element->size);
        range_add_block(&range, src + i * element->size, element);
    }
    if (i < count) {
        char block[BLOCK * sizeof(float)];
        tail_load(block, src + i * element->size, count - i, element->size);
        range_add_block(&range, block, element);
    }
    range_end(&range, mn, mx);
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

INLINE wide wide_add_magnitude(wide sum, wide x, int squares)
{
    return squares ? wide_add_square(sum, x) : wide_add(sum, x);
}

// Adds |x|, or x^2, of a block's vector number v.
INLINE void sums_add(struct sums *sums, int v, vec x, int squares)
{
    wide *part = &sums->part[2 * v % (2 * CODEC_SUMS / LANES)];
    part[0] = wide_add_magnitude(part[0], wide_low(vec_abs(x)), squares);
    part[1] = wide_add_magnitude(part[1], wide_high(vec_abs(x)), squares);
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
