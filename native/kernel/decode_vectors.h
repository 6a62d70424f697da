// Decoding with vectors, shared by all codecs with one code per element. The includer uses the vectors of vectors.h, and defines
//     struct grid               the parameters of the whole chunk, from the code at src
//     dequantize(grid, i, v)    vector number v of the block of 32 elements that begins with element i. Codes are padded,
//                               so all vectors of a last, shorter block may be requested

#include "kernel/functions.h"

// Results too large for the caches bypass them, if their alignment allows it.
INLINE int can_stream(const void *dst, size_t count, const struct element *element)
{
    return element->size == sizeof(float) && count >= STREAM_COUNT && (uintptr_t)dst % sizeof(vec) == 0;
}

INLINE void decode_block(char *to, const struct grid *grid, size_t i, const struct element *element, int stream)
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

INLINE void decode(void *dst, const struct grid *grid, size_t count, const struct element *element)
{
    char *to = dst;
    size_t i = 0;
    if (can_stream(dst, count, element)) {
        for (; i + BLOCK <= count; i += BLOCK)
            decode_block(to + i * element->size, grid, i, element, 1);
        _mm_sfence();                   // before the result is announced to another thread
    }
    for (; i + BLOCK <= count; i += BLOCK)
        decode_block(to + i * element->size, grid, i, element, 0);
    if (i < count) {
        char last[BLOCK * sizeof(float)];
        decode_block(last, grid, i, element, 0);
        memcpy(to + i * element->size, last, (count - i) * element->size);
    }
}

INLINE void add_block(char *to, const struct grid *grid, size_t i, const struct element *element)
{
    for (int v = 0; v < BLOCK_VECTORS; v++) {
        char *at = to + v * sizeof(vec);
        vec_store(at, vec_load(at) + element->round(dequantize(grid, i, v)));
    }
}

INLINE void decode_add(float *dst, const struct grid *grid, size_t count, const struct element *element)
{
    char *to = (char *)dst;
    size_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK)
        add_block(to + 4 * i, grid, i, element);
    if (i < count) {
        char last[BLOCK * sizeof(float)] = {0};
        memcpy(last, to + 4 * i, 4 * (count - i));
        add_block(last, grid, i, element);
        memcpy(to + 4 * i, last, 4 * (count - i));
    }
}

// <decoder>_decode_<element>_<isa> and <decoder>_decode_add_...; load: makes a struct grid from src, count and options.
#define DECODERS(decoder, element, load)            \
    DECODE(decoder, element)                        \
    {                                               \
        const struct grid grid = load;              \
        decode(dst, &grid, count, &element);        \
    }                                               \
    DECODE_ADD(decoder, element)                    \
    {                                               \
        const struct grid grid = load;              \
        decode_add(dst, &grid, count, &element);    \
    }
