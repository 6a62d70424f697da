// Codecs rotated1 to rotated4 with vectors of float32: a block stays in the L1 cache. Part of rotated_kernels.c.
#pragma once

#include "kernel/rotated.h"
#include "kernel/vectors.h"

// Operations with a version for each instruction set:
//     vec_lookup(table, n)     for each lane, entry n mod 8 of a table of 8 or 16
//     vec_numbered(table, n, k, b)    z of the b-bit numbers from bit k of n on, b = 1, 2, 4; other bits may be above
//     vec_within(x)            the butterflies of distances 1, 2, ... LANES / 2
//     whole_or_where(n, m, k)  n | k in the lanes of m, else n
//     words                    16 words, in an order that words_store knows
//     words_of(q)              the lower 16 bits, of ROWS wholes
//     words_or_where(n, m, k)  n | k in the words of ROWS masks, else n
//     words_or_signs(n, x)     n | 0x8000 in the words where ROWS vectors are negative, else n
//     words_store(p, n), words_load(p, q)    16 bits of each word; ROWS wholes
#ifdef __AVX512F__
#define vec_lookup(table, n) _mm512_permutexvar_ps((__m512i)(n), table)

INLINE vec vec_numbered(vec table, whole n, int k, int b)
{
    (void)b;
    return vec_lookup(table, n >> k);
}

// x t + s rounds only once, in the sum: t = 1 or -1.
INLINE vec with_partner(vec x, vec partner, mask upper)
{
    return _mm512_fmadd_ps(x, vec_choose(upper, vec_set1(1), vec_set1(-1)), partner);
}

INLINE vec vec_within(vec x)
{
    x = with_partner(x, _mm512_permute_ps(x, 0xb1), 0xaaaa);
    x = with_partner(x, _mm512_permute_ps(x, 0x4e), 0xcccc);
    x = with_partner(x, _mm512_shuffle_f32x4(x, x, 0xb1), 0xf0f0);
    return with_partner(x, _mm512_shuffle_f32x4(x, x, 0x4e), 0xff00);
}

INLINE whole whole_or_where(whole n, mask m, int k)
{
    return (whole)_mm512_mask_or_epi32((__m512i)n, m, (__m512i)n, _mm512_set1_epi32(k));
}

typedef whole words;
#define words_of(q) ((q)[0])
#define words_or_where(n, m, k) whole_or_where(n, (m)[0], k)
#define words_or_signs(n, x) whole_or_where(n, _mm512_movepi32_mask((__m512i)(x)[0]), 1 << 15)

INLINE void words_store(uint8_t *p, words n) { store_halves(p, halves_of(n)); }
#else
#define vec_lookup(table, n) _mm256_permutevar8x32_ps(table, (__m256i)(n))

// For 4 bits the table has only magnitudes.
INLINE vec vec_numbered(vec table, whole n, int k, int b)
{
    const vec z = vec_lookup(table, n >> k);
    return b == 4 ? vec_flipped(z, n << (28 - k)) : z;
}

// x t + s rounds only once, in the sum: t = 1 or -1.
INLINE vec vec_within(vec x)
{
    x = _mm256_fmadd_ps(x, _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1), _mm256_permute_ps(x, 0xb1));
    x = _mm256_fmadd_ps(x, _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1), _mm256_permute_ps(x, 0x4e));
    return _mm256_fmadd_ps(x, _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1), _mm256_permute2f128_ps(x, x, 1));
}

INLINE whole whole_or_where(whole n, mask m, int k) { return n | ((whole)m & (uint32_t)k); }

// packs works within each half of the register. It saturates, which keeps masks and signs.
typedef uint16_t words __attribute__((vector_size(sizeof(vec)), may_alias));
INLINE words words_of(const whole *q) { return (words)_mm256_packs_epi32((__m256i)q[0], (__m256i)q[1]); }
INLINE words words_or_where(words n, const mask *m, int k) { return n | (words_of((const whole *)m) & (uint16_t)k); }
#define words_or_signs(n, x) words_or_where(n, (const mask *)(x), 1 << 15)

INLINE void words_store(uint8_t *p, words n) { _mm256_storeu_si256((void *)p, _mm256_permute4x64_epi64((__m256i)n, 0xd8)); }
#endif

enum { ROWS = 16 / LANES, EACH = ROTATED_SUMS / LANES };

#define UNROLLED _Pragma("GCC unroll 16")

INLINE void words_load(const uint8_t *p, whole *q)
{
    UNROLLED for (int v = 0; v < ROWS; v++)
        q[v] = whole_from_halves(load_halves(p + v * sizeof(halves)));
}

// The butterflies of log2(n) distances over n = 2, 4 or 8 vectors.
INLINE void butterflies(vec *r, int n)
{
    UNROLLED for (int h = 1; h < n; h *= 2)
        UNROLLED for (int i = 0; i < n; i++)
            if (!(i & h)) {
                const vec sum = r[i] + r[i + h];
                r[i + h] = r[i] - r[i + h];
                r[i] = sum;
            }
}

// One pass: the log2(n) distances from h on.
INLINE void pass(float *a, size_t d, size_t h, int n)
{
    for (size_t begin = 0; begin < d; begin += (size_t)n * h)
        for (size_t i = begin; i < begin + h; i += LANES) {
            vec r[8];
            UNROLLED for (int k = 0; k < n; k++)
                r[k] = vec_load(a + i + (size_t)k * h);
            butterflies(r, n);
            UNROLLED for (int k = 0; k < n; k++)
                vec_store(a + i + (size_t)k * h, r[k]);
        }
}

// Copies a shorter block and pads it with zeros; returns the block to read.
INLINE const char *filled_up(char *block, const char *src, size_t count, size_t d, size_t size)
{
    if (count >= d)
        return src;
    memcpy(block, src, count * size);
    memset(block + count * size, 0, (d - count) * size);
    return block;
}

// a = H src, or if it flips H (signs src). src may be a.
INLINE void transform(float *a, const char *src, size_t d, const struct element *element, int flips, const uint32_t *signs)
{
    for (size_t i = 0; i < d; i += 8 * LANES) {
        vec r[8];
        UNROLLED for (int k = 0; k < 8; k++) {
            const vec x = element->load(src + (i + (size_t)k * LANES) * element->size);
            r[k] = vec_within(flips ? vec_negate(x, signs[i / BLOCK + (size_t)k / BLOCK_VECTORS], k % BLOCK_VECTORS) : x);
        }
        butterflies(r, 8);
        UNROLLED for (int k = 0; k < 8; k++)
            vec_store(a + i + (size_t)k * LANES, r[k]);
    }
    for (size_t h = 8 * LANES; h < d; h *= 8) {
        if (d / h >= 8)
            pass(a, d, h, 8);
        else if (d / h == 4)
            pass(a, d, h, 4);
        else
            pass(a, d, h, 2);
    }
}

INLINE void forward(float *a, const char *src, size_t count, size_t d, const uint32_t *signs, const struct element *element)
{
    char block[ROTATED_LARGEST_BLOCK * sizeof(float)];
    transform(a, filled_up(block, src, count, d, element->size), d, element, 1, signs);
}

// The element; a float16 is clamped so that it does not become an infinity.
INLINE vec element_of(const float *a, size_t i, int v, const uint32_t *signs, const struct element *element)
{
    const vec x = vec_negate(vec_load(a + i + (size_t)v * LANES), signs[i / BLOCK], v);
    if (element->largest > 65504)
        return x;
    return vec_max(vec_min(x, vec_set1(element->largest)), vec_set1(-element->largest));
}

INLINE void inverse(char *dst, size_t count, float *a, size_t d, const uint32_t *signs, const struct element *element, int adds)
{
    const size_t size = adds ? sizeof(float) : element->size;
    char block[ROTATED_LARGEST_BLOCK * sizeof(float)], *to = count == d ? dst : block;
    transform(a, (const char *)a, d, &f32, 0, NULL);
    if (adds)
        filled_up(block, dst, count, d, size);
    for (size_t i = 0; i < d; i += BLOCK)
        UNROLLED for (int v = 0; v < BLOCK_VECTORS; v += 2) {
            char *at = to + (i + (size_t)v * LANES) * size;
            const vec x = element_of(a, i, v, signs, element), y = element_of(a, i, v + 1, signs, element);
            if (adds)
                vec_store_two_f32(at, vec_load(at) + element->round(x), vec_load(at + sizeof x) + element->round(y));
            else
                element->store_two(at, x, y);
        }
    if (count != d)
        memcpy(dst, to, count * size);
}

INLINE float sums_of(vec *sums)
{
    UNROLLED for (int w = EACH / 2; w > 0; w /= 2)
        UNROLLED for (int p = 0; p < w; p++)
            sums[p] += sums[p + w];
    return vec_sum(sums[0]);
}

INLINE float squares(const float *a, size_t d)
{
    vec sums[EACH];
    UNROLLED for (int p = 0; p < EACH; p++)
        sums[p] = vec_set1(0);
    for (size_t i = 0; i < d; i += ROTATED_SUMS)
        UNROLLED for (int p = 0; p < EACH; p++) {
            const vec x = vec_load(a + i + (size_t)p * LANES);
            sums[p] += x * x;
        }
    return sums_of(sums);
}

// Thresholds, times s, and levels.
struct quantizer {
    vec threshold[4];           // for 4 bits only the last, which is between the halves
    vec above, below;           // for 4 bits: thresholds between quarters, eighths, indexed by the number so far
    vec level;                  // all levels
    vec least, next;            // for 1 and 2 bits
};

INLINE struct quantizer quantizer_of(const struct rotated_levels *levels, float s)
{
    const float *t = levels->threshold;
    struct quantizer with = {.least = vec_set1(levels->level[0]), .next = vec_set1(levels->level[1])};
    for (int k = 0; k < 4; k++)
        with.threshold[k] = vec_set1(t[k] * s);
    UNROLLED for (int q = 0; q < LANES; q++) {
        with.above[q] = t[(q & 4) + 1];
        with.below[q] = t[q & 6];
        with.level[q] = levels->level[q & 7];
    }
    with.above *= s;
    with.below *= s;
    return with;
}

// The level of the magnitude m. Also stores its number: for 2 bits in is_next, for more in q.
INLINE vec level_of(int bits, const struct quantizer *with, vec m, mask *is_next, whole *q)
{
    if (bits == 1)
        return with->least;
    if (bits == 2) {
        *is_next = vec_greater(m, with->threshold[0]);
        return vec_choose(*is_next, with->least, with->next);
    }
    *q = (whole){0};
    if (bits == 3) {
        const mask is_above = vec_greater(m, with->threshold[1]);
        *q = whole_or_where(*q, is_above, 2);
        *q = whole_or_where(*q, vec_greater(m, vec_choose(is_above, with->threshold[0], with->threshold[2])), 1);
    } else {
        *q = whole_or_where(*q, vec_greater(m, with->threshold[3]), 4);
        *q = whole_or_where(*q, vec_greater(m, vec_lookup(with->above, *q)), 2);
        *q = whole_or_where(*q, vec_greater(m, vec_lookup(with->below, *q)), 1);
    }
    return vec_lookup(with->level, *q);
}

// One part of b-bit numbers; with 3 bits, the signs go to `signs`. Each number enters at the top of its word, and is pushed down.
INLINE void quantize_part(const struct rotated_levels *levels, const struct quantizer *with, uint8_t *codes, const float *a,
                          vec *sums, words *signs)
{
    const int bits = levels->bits, b = bits == 3 ? 2 : bits;
    words n = {0};
    UNROLLED for (int k = 0; k < 16 / b; k++) {
        vec x[ROWS];
        mask is_next[ROWS];
        whole q[ROWS];
        UNROLLED for (int v = 0; v < ROWS; v++) {
            const int i = 16 * k + LANES * v;
            x[v] = vec_load(a + i);
            sums[i / LANES % EACH] += vec_abs(x[v]) * level_of(bits, with, vec_abs(x[v]), &is_next[v], &q[v]);
        }
        n >>= b;
        if (bits == 2)
            n = words_or_where(n, is_next, 1 << 14);
        if (bits > 2)
            n |= words_of(q) << (16 - b);
        if (bits == 3)
            *signs = words_or_signs(*signs >> 1, x);
        else
            n = words_or_signs(n, x);
    }
    words_store(codes, n);
}

INLINE float quantize(const struct rotated_levels *levels, uint8_t *codes, const float *a, size_t d, float s)
{
    const int bits = levels->bits, parts = bits == 3 ? 2 : bits;
    const struct quantizer with = quantizer_of(levels, s);
    vec sums[EACH];
    UNROLLED for (int p = 0; p < EACH; p++)
        sums[p] = vec_set1(0);
    for (size_t i = 0; i < d; i += ROTATED_PACK, codes += bits * ROTATED_PART) {
        words signs = {0};
        UNROLLED for (int p = 0; p < parts; p++)
            quantize_part(levels, &with, codes + p * ROTATED_PART, a + i + (size_t)(p * ROTATED_PACK / parts), sums, &signs);
        if (bits == 3)
            words_store(codes + 2 * ROTATED_PART, signs);
    }
    return sums_of(sums);
}

// The levels for a part's numbers, times t. With 3 bits, the signs are elsewhere.
INLINE vec levels_table(const struct rotated_levels *levels, float t)
{
    const int sign = 1 << (levels->bits - 1);
    vec table = vec_set1(0);
    UNROLLED for (int n = 0; n < LANES; n++) {
        const float level = levels->level[n & (sign - 1)];
        table[n] = levels->bits != 3 && n & sign ? -level : level;
    }
    return table * t;
}

INLINE void dequantize_part(const struct rotated_levels *levels, vec table, float *a, const uint8_t *codes, const whole *signs,
                            int row, int adds)
{
    const int bits = levels->bits, b = bits == 3 ? 2 : bits;
    whole n[ROWS];
    words_load(codes, n);
    UNROLLED for (int k = 0; k < 16 / b; k++)
        UNROLLED for (int v = 0; v < ROWS; v++) {
            float *at = a + 16 * k + LANES * v;
            vec z = vec_numbered(table, n[v], b * k, b);
            if (bits == 3)
                z = vec_flipped(z, signs[v] << (31 - row - k));
            if (adds)
                z += vec_load(at);
            vec_store(at, z);
        }
}

INLINE void dequantize(const struct rotated_levels *levels, float *a, const uint8_t *codes, size_t d, float t, int adds)
{
    const int bits = levels->bits, parts = bits == 3 ? 2 : bits;
    const vec table = levels_table(levels, t);
    for (size_t i = 0; i < d; i += ROTATED_PACK, codes += bits * ROTATED_PART) {
        whole signs[ROWS];
        if (bits == 3)
            words_load(codes + 2 * ROTATED_PART, signs);
        UNROLLED for (int p = 0; p < parts; p++)
            dequantize_part(levels, table, a + i + (size_t)(p * ROTATED_PACK / parts), codes + p * ROTATED_PART, signs,
                            p * 16 / parts, adds);
    }
}

#define ROTATED_IO(dtype, element, ...)                                                                             \
    SHARED void forward_##element(float *a, const char *src, size_t count, size_t d, const uint32_t *signs)         \
    {                                                                                                               \
        forward(a, src, count, d, signs, &element);                                                                 \
    }                                                                                                               \
    SHARED void inverse_##element(char *dst, size_t count, float *a, size_t d, const uint32_t *signs, int adds)     \
    {                                                                                                               \
        if (adds)                                                                                                   \
            inverse(dst, count, a, d, signs, &element, 1);                                                          \
        else                                                                                                        \
            inverse(dst, count, a, d, signs, &element, 0);                                                          \
    }                                                                                                               \
    static const struct io io_##element = {sizeof(any_##element), forward_##element, inverse_##element, store_##element};
