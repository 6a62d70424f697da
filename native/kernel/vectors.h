// Vector operations that do not depend on the instruction set, for files that are compiled for each (build.py). A `vec` is LANES
// floats, a `whole` as many 32-bit integers with the same bits; both support the operators of C. For each instruction set there are
//     vec_load, vec_store, vec_stream (aligned), vec_set1, vec_rint, vec_min, vec_max
//     vec_store_two_bf16(p, a, b)
//     mask                     of lanes, taking |; MASK_NONE, mask_bits(m): bit i: lane i
//     vec_greater(a, b), vec_unordered(a, b)    lanes where a > b; where one is a NaN
//     vec_choose(m, a, b)      b in the lanes of m, else a
//     vec_negate(x, bits, v)   the sign of lane i flipped where bit v LANES + i is set; v < BLOCK_VECTORS
//     vec_least(x), vec_greatest(x)    over the lanes, none of which is a NaN
//     vec_sum(x)               lane j plus lane j + w, for w = LANES / 2, ... 1
//     vec_nearest(x), vec_truncated(x) as a `whole`
//     whole_with_upper(a, b)   a, with the upper 16 bits of b
//     bytes_signed(n), bytes_unsigned(n)    BLOCK numbers as bytes
//     vec_to_u8(q)             BLOCK numbers as bytes, rounded and clamped to 0..255
//     vec_load_bytes(p)        LANES bytes; vec_from_i8(bytes), vec_from_u8(bytes): as numbers
//     halves, load_halves, store_halves, stream_halves (aligned)  LANES 16-bit numbers
//     halves_from_bytes(bytes), halves_from_floats(x), vec_from_halves(h), whole_from_halves(h)      as floats: float16
//     halves_of(n)             the numbers of a `whole`, all of 16 bits
//     wide, wide_low(x), wide_high(x), wide_store                 half of the lanes as doubles
//     wide_add_square(sum, x)  sum + x x, where the product is exact: x comes from a float32
#pragma once

#include <immintrin.h>

#include "kernel/codec.h"
#include "kernel/loops.h"

#ifdef __AVX512F__
enum { LANES = 16 };
typedef __m512 vec;
#else
enum { LANES = 8 };
typedef __m256 vec;
#endif
typedef uint32_t whole __attribute__((vector_size(sizeof(vec)), may_alias));

enum {
    BLOCK = 32,                         // elements per iteration of a loop
    BLOCK_VECTORS = BLOCK / LANES,
    PREFETCH_BYTES = 8192,              // prefetch distance; reading past the end of the source is harmless
    STREAM_COUNT = 4 << 20              // elements, from which on results bypass the caches
};

// The upper half of each lane becomes x rounded to bfloat16. x: a number or the canonical NaN (others might overflow).
INLINE whole rounded_bf16(vec x) { return (whole)x + ((whole)x >> 16 & 1) + 0x7fff; }

#ifdef __AVX512F__
// ------------------------------------------------------------------------------------------------------------ AVX-512

#define vec_set1 _mm512_set1_ps
#define vec_min _mm512_min_ps
#define vec_max _mm512_max_ps
#define vec_least _mm512_reduce_min_ps
#define vec_greatest _mm512_reduce_max_ps
#define vec_sum _mm512_reduce_add_ps

INLINE vec vec_load(const void *p) { return _mm512_loadu_ps(p); }
INLINE void vec_store(void *p, vec x) { _mm512_storeu_ps(p, x); }
INLINE void vec_stream(void *p, vec x) { _mm512_stream_ps(p, x); }
INLINE vec vec_rint(vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

typedef __m256i halves;
#define halves_from_bytes _mm256_cvtepu8_epi16
#define halves_from_floats(x) _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)
#define vec_from_halves _mm512_cvtph_ps

INLINE halves load_halves(const void *p) { return _mm256_loadu_si256(p); }
INLINE void store_halves(void *p, halves h) { _mm256_storeu_si256(p, h); }
INLINE void stream_halves(void *p, halves h) { _mm256_stream_si256(p, h); }
INLINE whole whole_from_halves(halves h) { return (whole)_mm512_cvtepu16_epi32(h); }
INLINE halves halves_of(whole n) { return _mm512_cvtepi32_epi16((__m512i)n); }

INLINE void vec_store_two_bf16(void *p, vec a, vec b)
{
    store_halves(p, halves_of(rounded_bf16(a) >> 16));
    store_halves((char *)p + sizeof(halves), halves_of(rounded_bf16(b) >> 16));
}

typedef __mmask16 mask;

#define MASK_NONE 0
#define mask_bits(m) (m)

INLINE mask vec_greater(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
INLINE mask vec_unordered(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
INLINE vec vec_choose(mask m, vec a, vec b) { return _mm512_mask_blend_ps(m, a, b); }
INLINE vec vec_negate(vec x, uint32_t bits, int v)
{
    return _mm512_mask_xor_ps(x, (mask)(bits >> v * LANES), x, vec_set1(-0.0f));
}

INLINE whole vec_nearest(vec x) { return (whole)_mm512_cvtps_epi32(x); }
INLINE whole vec_truncated(vec x) { return (whole)_mm512_cvttps_epi32(x); }

INLINE whole whole_with_upper(whole a, whole b)
{
    return (whole)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)a, (__m512i)b);
}

INLINE __m256i joined(__m128i low, __m128i high)
{
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

INLINE __m256i bytes_signed(const whole *n)
{
    return joined(_mm512_cvtepi32_epi8((__m512i)n[0]), _mm512_cvtepi32_epi8((__m512i)n[1]));
}

#define bytes_unsigned bytes_signed

// The conversion to bytes saturates unsigned numbers, so only the lower clamp is needed.
INLINE __m128i clamped_u8(vec q) { return _mm512_cvtusepi32_epi8((__m512i)vec_nearest(vec_max(q, vec_set1(0)))); }
INLINE __m256i vec_to_u8(const vec *q) { return joined(clamped_u8(q[0]), clamped_u8(q[1])); }

INLINE __m128i vec_load_bytes(const uint8_t *p) { return _mm_loadu_si128((const __m128i *)p); }
INLINE vec vec_from_i8(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
INLINE vec vec_from_u8(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)); }

typedef __m512d wide;

#define wide_add_square(sum, x) _mm512_fmadd_pd(x, x, sum)
#define wide_store _mm512_storeu_pd

INLINE wide wide_low(vec x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
INLINE wide wide_high(vec x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }
#else
// --------------------------------------------------------------------------------------------------------------- AVX2

#define vec_set1 _mm256_set1_ps
#define vec_min _mm256_min_ps
#define vec_max _mm256_max_ps

INLINE vec vec_load(const void *p) { return _mm256_loadu_ps(p); }
INLINE void vec_store(void *p, vec x) { _mm256_storeu_ps(p, x); }
INLINE void vec_stream(void *p, vec x) { _mm256_stream_ps(p, x); }
INLINE vec vec_rint(vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

INLINE float vec_least(vec x)
{
    __m128 y = _mm_min_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_min_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_min_ss(y, _mm_movehdup_ps(y)));
}

INLINE float vec_greatest(vec x)
{
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

INLINE float vec_sum(vec x)
{
    __m128 y = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
    y += _mm_movehl_ps(y, y);
    return y[0] + y[1];
}

typedef __m128i halves;
#define halves_from_bytes _mm_cvtepu8_epi16
#define halves_from_floats(x) _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)
#define vec_from_halves _mm256_cvtph_ps

INLINE halves load_halves(const void *p) { return _mm_loadu_si128(p); }
INLINE void store_halves(void *p, halves h) { _mm_storeu_si128(p, h); }
INLINE void stream_halves(void *p, halves h) { _mm_stream_si128(p, h); }
INLINE whole whole_from_halves(halves h) { return (whole)_mm256_cvtepu16_epi32(h); }

// packus works within each half of the register; lanes 0 and 2 then hold the eight results.
INLINE halves halves_of(whole n)
{
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)n, (__m256i)n), 0x08));
}

// packs and packus work within each half of the register, so their results are permuted afterwards.
INLINE void vec_store_two_bf16(void *p, vec a, vec b)
{
    const __m256i packed = _mm256_packus_epi32((__m256i)(rounded_bf16(a) >> 16), (__m256i)(rounded_bf16(b) >> 16));
    _mm256_storeu_si256(p, _mm256_permute4x64_epi64(packed, 0xd8));
}

typedef __m256i mask;

#define MASK_NONE _mm256_setzero_si256()

INLINE uint32_t mask_bits(mask m) { return (uint32_t)_mm256_movemask_ps((vec)m); }
INLINE mask vec_greater(vec a, vec b) { return (mask)_mm256_cmp_ps(a, b, _CMP_GT_OQ); }
INLINE mask vec_unordered(vec a, vec b) { return (mask)_mm256_cmp_ps(a, b, _CMP_UNORD_Q); }
INLINE vec vec_choose(mask m, vec a, vec b) { return _mm256_blendv_ps(a, b, (vec)m); }

INLINE vec vec_negate(vec x, uint32_t bits, int v)
{
    const whole to_top = (whole){31, 30, 29, 28, 27, 26, 25, 24} - (uint32_t)(v * LANES);
    return (vec)((whole)x ^ (bits << to_top & 0x80000000));
}

INLINE whole vec_nearest(vec x) { return (whole)_mm256_cvtps_epi32(x); }
INLINE whole vec_truncated(vec x) { return (whole)_mm256_cvttps_epi32(x); }

INLINE whole whole_with_upper(whole a, whole b) { return (whole)_mm256_blend_epi16((__m256i)a, (__m256i)b, 0xaa); }

INLINE __m256i words_signed(whole a, whole b) { return _mm256_packs_epi32((__m256i)a, (__m256i)b); }
INLINE __m256i sorted(__m256i x) { return _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)); }

INLINE __m256i bytes_signed(const whole *n)
{
    return sorted(_mm256_packs_epi16(words_signed(n[0], n[1]), words_signed(n[2], n[3])));
}

INLINE __m256i bytes_unsigned(const whole *n)
{
    return sorted(_mm256_packus_epi16(words_signed(n[0], n[1]), words_signed(n[2], n[3])));
}

// packs and packus saturate, which is the clamp.
INLINE __m256i vec_to_u8(const vec *q)
{
    const whole n[] = {vec_nearest(q[0]), vec_nearest(q[1]), vec_nearest(q[2]), vec_nearest(q[3])};
    return bytes_unsigned(n);
}

INLINE __m128i vec_load_bytes(const uint8_t *p) { return _mm_loadl_epi64((const __m128i *)p); }
INLINE vec vec_from_i8(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }
INLINE vec vec_from_u8(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)); }

typedef __m256d wide;

#define wide_add_square(sum, x) _mm256_add_pd(sum, _mm256_mul_pd(x, x))
#define wide_store _mm256_storeu_pd

INLINE wide wide_low(vec x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
INLINE wide wide_high(vec x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
#endif

// --------------------------------------------------------------------------------------------------------------- both

INLINE vec vec_abs(vec x) { return (vec)((whole)x & 0x7fffffff); }
// A magnitude with the sign of x.
INLINE vec vec_with_sign(vec magnitude, vec x) { return (vec)((whole)magnitude | ((whole)x & 0x80000000)); }
// x, negated where the highest bit is set.
INLINE vec vec_flipped(vec x, whole n) { return (vec)((whole)x ^ (n & 0x80000000)); }
INLINE vec vec_canonical(vec x) { return vec_choose(vec_unordered(x, x), x, vec_set1((float)NAN)); }

// u of codec.h from x, which has h from bit 7 on: the bits of 1 + u are assembled directly.
INLINE vec uniform_of(whole x) { return (vec)((x & 0x007fff80) | 0x3f800040) - 1; }

// codec_uniform for the BLOCK elements from index on, a multiple of BLOCK.
INLINE void vec_uniforms(struct codec_key key, uint32_t index, vec *u)
{
    whole lanes = {0};
    for (uint32_t i = 0; i < LANES; i++)
        lanes[i] = i;                   // has no bits in common with index / 2
    for (int v = 0; v < BLOCK_VECTORS / 2; v++) {
        whole x = lanes ^ key.a ^ (index / 2 + (uint32_t)v * LANES);
        x = (x ^ x >> 16) * CODEC_RANDOM_MULTIPLIER_1;
        x = (x ^ x >> 15 ^ key.b) * CODEC_RANDOM_MULTIPLIER_2;
        x ^= x >> 15;
        u[v] = uniform_of(x << 7);
        u[v + BLOCK_VECTORS / 2] = uniform_of(x >> 9);
    }
}

// Prefetches the cache lines of the block PREFETCH_BYTES ahead.
INLINE void prefetch_block(const char *block, size_t size)
{
    for (size_t line = 0; line < BLOCK * size; line += 64)
        _mm_prefetch(block + PREFETCH_BYTES + line, _MM_HINT_T0);
}

INLINE vec vec_load_f16(const void *p) { return vec_from_halves(load_halves(p)); }
INLINE vec vec_load_bf16(const void *p) { return (vec)(whole_from_halves(load_halves(p)) << 16); }
INLINE void vec_store_f16(void *p, vec x) { store_halves(p, halves_from_floats(x)); }

INLINE vec vec_round_f32(vec x) { return x; }
INLINE vec vec_round_f16(vec x) { return vec_from_halves(halves_from_floats(x)); }
INLINE vec vec_round_bf16(vec x) { return (vec)(rounded_bf16(x) & 0xffff0000); }

INLINE void vec_store_two_f32(void *p, vec a, vec b)
{
    vec_store(p, a);
    vec_store((char *)p + sizeof a, b);
}

INLINE void vec_store_two_f16(void *p, vec a, vec b)
{
    vec_store_f16(p, a);
    vec_store_f16((char *)p + sizeof(halves), b);
}

// An element type: its vector operations, and scalar ones for the header.
struct element {
    size_t size;
    float largest;                              // number
    vec (*load)(const void *p);
    void (*store_two)(void *p, vec a, vec b);   // finite numbers, one vector after the other
    vec (*round)(vec x);                        // finite numbers rounded to the element type, still as float32
    float (*load_one)(const void *p);
    void (*store_one)(void *p, float x);
};
static const struct element f32 = {4, LARGEST_f32, vec_load, vec_store_two_f32, vec_round_f32, load_f32, store_f32};
static const struct element f16 = {2, LARGEST_f16, vec_load_f16, vec_store_two_f16, vec_round_f16, load_f16, store_f16};
static const struct element bf16 = {2, (float)LARGEST_bf16, vec_load_bf16, vec_store_two_bf16, vec_round_bf16,
                                    load_bf16, store_bf16};

// Copies the last count < BLOCK elements, padded to a block with zeros.
INLINE void tail_zeros(char *block, const char *src, size_t count, size_t size)
{
    memcpy(block, src, count * size);
    memset(block + count * size, 0, (BLOCK - count) * size);
}

// Copies the last count % BLOCK elements, padded to a block by repeating the first of them.
INLINE void tail_load(char *block, const char *src, size_t count, size_t size)
{
    memcpy(block, src, count * size);
    for (size_t i = count; i < BLOCK; i++)
        memcpy(block + i * size, src, size);
}

// -------------------------------------------------------------------------------------------------- minimum, maximum

struct range {
    vec mn[2], mx[2];
    mask nans;
};

// Adds two vectors, to separate accumulators, so that consecutive blocks do not depend on each other.
INLINE void range_add(struct range *range, int which, vec a, vec b)
{
    range->mn[which] = vec_min(range->mn[which], vec_min(a, b));
    range->mx[which] = vec_max(range->mx[which], vec_max(a, b));
    // The minimum of two drops a NaN on one side, so NaNs are detected separately; one comparison serves two vectors.
    range->nans = range->nans | vec_unordered(a, b);
}

INLINE void range_add_block(struct range *range, const char *block, const struct element *element)
{
    const size_t stride = LANES * element->size;
    for (int v = 0; v < BLOCK_VECTORS; v += 2)
        range_add(range, v / 2 % 2, element->load(block + v * stride), element->load(block + (v + 1) * stride));
}

#define RANGE_NONE                                                                                                   \
    {{vec_set1(INFINITY), vec_set1(INFINITY)}, {vec_set1(-INFINITY), vec_set1(-INFINITY)}, MASK_NONE}

// The minimum and the maximum, never -0.0; both NaN if an element was not finite.
INLINE void range_end(const struct range *range, float *mn, float *mx)
{
    *mn = vec_least(vec_min(range->mn[0], range->mn[1]));
    *mx = vec_greatest(vec_max(range->mx[0], range->mx[1]));
    const int is_finite = !mask_bits(range->nans) && *mn >= -FLT_MAX && *mx <= FLT_MAX;
    *mn = is_finite ? *mn + 0 : (float)NAN;     // + 0 turns -0.0 into +0.0
    *mx = is_finite ? *mx + 0 : (float)NAN;
}

// Sets mn and mx to the elements' minimum and maximum, or both to NaN if an element is not finite.
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

// --------------------------------------------------------------------------------------------- one code per element

// vector number v of the block of 32 elements that begins with element i. grid: the parameters of the whole segment, from its code.
// Codes are padded, so all vectors of a last, shorter block may be requested.
typedef vec (*dequantize_fn)(const void *grid, size_t i, int v);

// Results too large for the caches bypass them, if their alignment allows it.
INLINE int can_stream(const void *dst, size_t count, const struct element *element)
{
    return element->size == sizeof(float) && count >= STREAM_COUNT && (uintptr_t)dst % sizeof(vec) == 0;
}

INLINE void decode_block(char *to, const void *grid, dequantize_fn dequantize, size_t i, const struct element *element, int stream)
{
    for (int v = 0; v < BLOCK_VECTORS; v += 2) {
        const vec a = dequantize(grid, i, v), b = dequantize(grid, i, v + 1);
        if (stream) {
            vec_stream(to + v * sizeof(vec), a);
            vec_stream(to + (v + 1) * sizeof(vec), b);
        } else
            element->store_two(to + v * LANES * element->size, a, b);
    }
}

INLINE void decode_vectors(void *dst, const void *grid, dequantize_fn dequantize, size_t count, const struct element *element)
{
    char *to = dst;
    size_t i = 0;
    if (can_stream(dst, count, element)) {
        for (; i + BLOCK <= count; i += BLOCK)
            decode_block(to + i * element->size, grid, dequantize, i, element, 1);
        _mm_sfence();                   // before the result is announced to another thread
    }
    for (; i + BLOCK <= count; i += BLOCK)
        decode_block(to + i * element->size, grid, dequantize, i, element, 0);
    if (i < count) {
        char last[BLOCK * sizeof(float)];
        decode_block(last, grid, dequantize, i, element, 0);
        memcpy(to + i * element->size, last, (count - i) * element->size);
    }
}

INLINE void add_block(char *to, const void *grid, dequantize_fn dequantize, size_t i, const struct element *element)
{
    for (int v = 0; v < BLOCK_VECTORS; v++) {
        char *at = to + v * sizeof(vec);
        vec_store(at, vec_load(at) + element->round(dequantize(grid, i, v)));
    }
}

INLINE void decode_add_vectors(float *dst, const void *grid, dequantize_fn dequantize, size_t count, const struct element *element)
{
    char *to = (char *)dst;
    size_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK)
        add_block(to + 4 * i, grid, dequantize, i, element);
    if (i < count) {
        char last[BLOCK * sizeof(float)] = {0};
        memcpy(last, to + 4 * i, 4 * (count - i));
        add_block(last, grid, dequantize, i, element);
        memcpy(to + 4 * i, last, 4 * (count - i));
    }
}

// The decoding of a codec. load: makes a `struct grid` from src, count and options.
#define DECODERS(name, element, dequantize, load)                           \
    DECODE(name, element)                                                   \
    {                                                                       \
        const struct grid grid = load;                                      \
        decode_vectors(dst, &grid, dequantize, count, &element);            \
    }                                                                       \
    DECODE_ADD(name, element)                                               \
    {                                                                       \
        const struct grid grid = load;                                      \
        decode_add_vectors(dst, &grid, dequantize, count, &element);        \
    }
