// Codec minmax_uint8. Formula and layout: minmax_uint8.h.
//
// With vectors, encode reads the source twice, each time at the speed of memory: it prefetches further than the hardware does, and
// the codes of a segment that is too large for any cache bypass the caches. (Measured and rejected: the second pass from back to
// front; the prefetchers lose more than the warm end gains.)
#include "kernel/minmax_uint8.h"

#include "kernel/loops.h"

// One element at a time: the definition, and for float64, which the compiler vectorizes, all there is.
#define MINMAX_UINT8_LOOPS(element, real)                                                                               \
    RANGE_LOOP(element, real)                                                                                           \
    ENCODE(minmax_uint8, element)                                                                                       \
    {                                                                                                                   \
        enum { SIZE = sizeof(any_##element) };                                                                          \
        const char *from = src;                                                                                         \
        uint8_t *codes = (uint8_t *)dst + CODEC_HEADER;                                                                 \
        real mn, mx;                                                                                                    \
        range_##element(from, count, &mn, &mx);                                                                         \
        codec_header_init(dst, MINMAX_UINT8_VERSION, mn == mn);                                                         \
        store_##element(dst, mn);                                                                                       \
        store_##element((char *)dst + SIZE, mx);                                                                        \
        size_t done = 0;                                                                                                \
        if (mx > mn) {                                                                                                  \
            const struct minmax_uint8_##real##_grid grid = minmax_uint8_##real##_grid(mn, mx);                          \
            for (; done < count; done++)                                                                                \
                codes[done] = (uint8_t)(int)minmax_uint8_##real##_quantize(&grid, load_##element(from + SIZE * done));  \
        }                                                                                                               \
        memset(codes + done, 0, codec_padded(count) - done);                                                            \
    }                                                                                                                   \
    struct decoder_##element {                                                                                          \
        const uint8_t *codes;                                                                                           \
        struct minmax_uint8_##real##_grid grid;                                                                         \
        real mn;                                                                                                        \
        int has_grid;           /* false: a segment of equal elements, or with an element that is not finite */           \
    };                                                                                                                  \
    INLINE struct decoder_##element decoder_of_##element(const void *src)                                               \
    {                                                                                                                   \
        const real mn = load_##element(src), mx = load_##element((const char *)src + sizeof(any_##element));            \
        struct decoder_##element d = {.codes = (const uint8_t *)src + CODEC_HEADER, .mn = mn, .has_grid = mx > mn};     \
        if (d.has_grid)                                                                                                 \
            d.grid = minmax_uint8_##real##_grid(mn, mx);                                                                \
        return d;                                                                                                       \
    }                                                                                                                   \
    INLINE real decode_one_##element(const struct decoder_##element *d, size_t i)                                       \
    {                                                                                                                   \
        return d->has_grid ? minmax_uint8_##real##_dequantize(&d->grid, d->codes[i]) : d->mn;                           \
    }                                                                                                                   \
    DECODE_LOOPS(minmax_uint8, element, decoder_##element, decoder_of_##element(src), decode_one_##element)

#ifdef VECTORS
#include "kernel/vectors.h"

MINMAX_UINT8_LOOPS(f64, double)

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
    if (!(mx > mn))             // a constant segment, or a NaN: all elements decode to mn
        return (struct grid){codes, vec_set1(0), vec_set1(0), vec_set1(mn), vec_set1(mn)};
    const struct minmax_uint8_float_grid grid = minmax_uint8_float_grid(mn, mx);
    return (struct grid){codes, vec_set1(grid.lb), vec_set1(grid.t), vec_set1(mn), vec_set1(mx)};
}

// If one operand is a NaN, vec_min and vec_max return the second.
INLINE vec dequantize(const void *arg, size_t i, int v)
{
    const struct grid *grid = arg;
    const vec x = (vec_from_u8(vec_load_bytes(grid->codes + i + v * LANES)) + grid->lb) * grid->t;
    return vec_min(vec_max(x, grid->mn), grid->mx);
}

#define MINMAX_UINT8(dtype, element, name)                          \
    ENCODE(name, element) { encode(dst, src, count, &element); }    \
    DECODERS(name, element, dequantize, grid_load(src, &element))
EACH_VECTOR_TYPE(MINMAX_UINT8, minmax_uint8)
#else
EACH_REAL(MINMAX_UINT8_LOOPS)
#endif

static size_t minmax_uint8_encoded_size(bhvd_dtype dtype, size_t count, const struct bhvd_codec_options *options)
{
    (void)dtype, (void)options;
    return CODEC_HEADER + codec_padded(count);
}

void NAME(minmax_uint8_kernels_init)(struct kernel_table *table)
{
    EACH_FLOAT_TYPE(CODEC_SET, BHVD_CODEC_MINMAX_UINT8, MINMAX_UINT8_VERSION, minmax_uint8_encoded_size, minmax_uint8, minmax_uint8)
}
