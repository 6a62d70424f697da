// Codec minmax_uint8 with vectors of float32, one block of 32 codes at a time; float64 with the compiler's vectors.
//
// encode reads the source twice, each time at the speed of memory: it prefetches further than the hardware does, and the codes of a
// chunk that is too large for any cache bypass the caches. (Measured and rejected: the second pass from back to front; the
// prefetchers lose more than the warm end gains.)
#include "kernel/minmax_uint8.h"
#include "kernel/of_element.h"
#include "kernel/variants.h"
#include "kernel/vectors.h"

#define ELEMENT f64
#include "kernel/minmax_uint8_loops.h"

INLINE __m256i quantize_block(const char *block, const struct element *element, vec s, vec lb)
{
    vec q[BLOCK_VECTORS];
    for (int v = 0; v < BLOCK_VECTORS; v++)
        q[v] = vec_rint(element->load(block + v * LANES * element->size) * s) - lb;
    return vec_to_u8(q);
}

INLINE void encode(void *dst, const void *src, size_t count, const struct element *element)
{
    const char *from = src;
    uint8_t *codes = (uint8_t *)dst + CODEC_HEADER;
    float mn = 0, mx = 0;
    if (count > 0)
        range_find(from, count, element, &mn, &mx);
    codec_header_init(dst, MINMAX_UINT8_VERSION, mn == mn);
    element->store_one(dst, mn);
    element->store_one((char *)dst + element->size, mx);
    if (!(mx > mn)) {
        memset(codes, 0, codec_padded(count));
        return;
    }

    const struct minmax_uint8_float_grid grid = minmax_uint8_float_grid(mn, mx);
    const vec s = vec_set1(grid.s), lb = vec_set1(grid.lb);
    const int stream = count >= STREAM_COUNT && (uintptr_t)codes % BLOCK == 0;
    size_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) {
        prefetch_block(from + i * element->size, element->size);
        const __m256i q = quantize_block(from + i * element->size, element, s, lb);
        if (stream)
            _mm256_stream_si256((__m256i *)(codes + i), q);
        else
            _mm256_storeu_si256((__m256i *)(codes + i), q);
    }
    if (stream)
        _mm_sfence();                   // before the codes are announced to another thread
    if (i < count) {
        char block[BLOCK * sizeof(float)];
        tail_load(block, from + i * element->size, count - i, element->size);
        _mm256_storeu_si256((__m256i *)block, quantize_block(block, element, s, lb));
        memcpy(codes + i, block, count - i);
        memset(codes + count, 0, BLOCK - (count - i));
    }
}

struct grid {
    const uint8_t *codes;
    vec lb, t, mn, mx;
};

INLINE struct grid grid_load(const void *src, const struct element *element)
{
    const uint8_t *codes = (const uint8_t *)src + CODEC_HEADER;
    const float mn = canonical_nan(element->load_one(src)), mx = element->load_one((const char *)src + element->size);
    if (!(mx > mn))             // a constant chunk, or a NaN: all elements decode to mn
        return (struct grid){codes, vec_set1(0), vec_set1(0), vec_set1(mn), vec_set1(mn)};
    const struct minmax_uint8_float_grid grid = minmax_uint8_float_grid(mn, mx);
    return (struct grid){codes, vec_set1(grid.lb), vec_set1(grid.t), vec_set1(mn), vec_set1(mx)};
}

// If one operand is a NaN, vec_min and vec_max return the second.
INLINE vec dequantize(const struct grid *grid, size_t i, int v)
{
    const vec x = (vec_from_u8(vec_load_bytes(grid->codes + i + v * LANES)) + grid->lb) * grid->t;
    return vec_min(vec_max(x, grid->mn), grid->mx);
}

#include "kernel/decode_vectors.h"

#define MINMAX_UINT8(dtype, element, name)                          \
    ENCODE(name, element) { encode(dst, src, count, &element); }    \
    DECODERS(name, element, grid_load(src, &element))
EACH_VECTOR_TYPE(MINMAX_UINT8, minmax_uint8)

void NAME(minmax_uint8_kernels_init)(struct kernel_table *table)
{
    EACH_FLOAT_TYPE(CODEC_SET, BHVD_CODEC_MINMAX_UINT8, minmax_uint8, minmax_uint8)
}
