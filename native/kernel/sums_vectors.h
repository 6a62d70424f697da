// Sums in the order of codec_sums.h with vectors: partial sum j is a lane.
#pragma once

#include "kernel/codec_sums.h"
#include "kernel/vectors.h"

enum { SUMS_WIDES = 2 * CODEC_SUMS / LANES };

// Adds |x|, or x^2, of vector number v of a block.
INLINE void sums_add(wide *sums, int v, vec x, int squares)
{
    wide *sum = &sums[2 * v % SUMS_WIDES];
    const wide low = wide_low(vec_abs(x)), high = wide_high(vec_abs(x));
    sum[0] = squares ? wide_add_square(sum[0], low) : (wide)(sum[0] + low);
    sum[1] = squares ? wide_add_square(sum[1], high) : (wide)(sum[1] + high);
}

// Adds a block of BLOCK elements; returns their signs. Bit i: element i is negative.
INLINE uint32_t sums_add_block(wide *sums, const char *block, const struct element *element, int squares)
{
    uint32_t signs = 0;
    for (int v = 0; v < BLOCK_VECTORS; v++) {
        const vec x = element->load(block + v * LANES * element->size);
        sums_add(sums, v, x, squares);
        signs |= (uint32_t)mask_bits(vec_greater(vec_set1(0), x)) << v * LANES;
    }
    return signs;
}

// codec_sums_total: adds vectors until one is left.
INLINE double sums_total(wide *sums)
{
    double parts[LANES / 2];
    for (int w = SUMS_WIDES / 2; w > 0; w /= 2)
        for (int p = 0; p < w; p++)
            sums[p] += sums[p + w];
    wide_store(parts, sums[0]);
    for (int w = LANES / 4; w > 0; w /= 2)
        for (int j = 0; j < w; j++)
            parts[j] += parts[j + w];
    return parts[0];
}

// The sum of up to CODEC_SUMS_BLOCK elements; also stores their signs if `bits` is not NULL.
INLINE double sums_of(const char *src, size_t count, const struct element *element, int squares, uint8_t *bits)
{
    wide sums[SUMS_WIDES] = {{0}};
    char last[BLOCK * sizeof(float)];
    size_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) {
        prefetch_block(src + i * element->size, element->size);
        const uint32_t signs = sums_add_block(sums, src + i * element->size, element, squares);
        if (bits)
            memcpy(bits + i / 8, &signs, sizeof signs);
    }
    if (i < count) {
        tail_zeros(last, src + i * element->size, count - i, element->size);
        const uint32_t signs = sums_add_block(sums, last, element, squares);
        if (bits)
            memcpy(bits + i / 8, &signs, sizeof signs);
    }
    return sums_total(sums);
}
