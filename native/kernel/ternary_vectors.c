// Codec ternary by vectors of float32, a block of 32 elements at a time.
#include "kernel/ternary.h"
#include "kernel/variants.h"
#include "kernel/vectors.h"

INLINE vec largest_of_block(vec largest, const char *block, const struct element *element, vec_nans *nans)
{
    for (int v = 0; v < BLOCK / LANES; v += 2) {
        const vec a = element->load(block + v * LANES * element->size);
        const vec b = element->load(block + (v + 1) * LANES * element->size);
        *nans = vec_nans_add(*nans, a, b);
        largest = vec_max(largest, vec_max(vec_abs(a), vec_abs(b)));
    }
    return largest;
}

// max |x|, or NaN when an element is not finite.
INLINE float largest_find(const char *src, size_t count, const struct element *element)
{
    vec largest = vec_set1(0);
    vec_nans nans = VEC_NANS_NONE;
    size_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) {
        prefetch_block(src + i * element->size, element->size);
        largest = largest_of_block(largest, src + i * element->size, element, &nans);
    }
    if (i < count) {
        char block[BLOCK * sizeof(float)];
        tail_zeros(block, src + i * element->size, count - i, element->size);
        largest = largest_of_block(largest, block, element, &nans);
    }
    float lanes[LANES], s = 0;
    vec_store(lanes, largest);
    for (int lane = 0; lane < LANES; lane++)
        s = lanes[lane] > s ? lanes[lane] : s;
    return !vec_nans_any(nans) && s <= FLT_MAX ? s : (float)NAN;
}

INLINE struct ternary_block encode_block(const char *block, const struct element *element, vec s, struct codec_key key,
                                         uint32_t index)
{
    struct ternary_block bits = {0, 0};
    vec u[BLOCK / LANES];
    vec_uniforms(key, index, u);
    for (int v = 0; v < BLOCK / LANES; v++) {
        const vec x = element->load(block + v * LANES * element->size);
        const vec threshold = vec_mul(u[v], s);
        bits.kept |= vec_less(threshold, vec_abs(x)) << v * LANES;
        bits.negative |= vec_less(x, vec_set1(0)) << v * LANES;
    }
    bits.negative &= bits.kept;
    return bits;
}

INLINE void encode(void *dst, const void *src, size_t count, const struct element *element, uint64_t seed)
{
    const char *from = src;
    char *blocks = (char *)dst + CODEC_HEADER;
    const float largest = largest_find(from, count, element);
    codec_header_init(dst, TERNARY_VERSION, largest == largest);
    store_f32(dst, largest);
    if (!(largest > 0)) {
        memset(blocks, 0, ternary_blocks_size(count));
        return;
    }
    struct codec_key key = codec_key(seed, 0);
    struct ternary_block bits;
    size_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) {
        if ((uint32_t)i == 0)
            key = codec_key(seed, i);
        prefetch_block(from + i * element->size, element->size);
        bits = encode_block(from + i * element->size, element, vec_set1(largest), key, (uint32_t)i);
        memcpy(blocks + i / BLOCK * sizeof bits, &bits, sizeof bits);
    }
    memset(blocks + i / BLOCK * sizeof bits, 0, ternary_blocks_size(count) - i / BLOCK * sizeof bits);
    if (i < count) {
        char block[BLOCK * sizeof(float)];
        tail_zeros(block, from + i * element->size, count - i, element->size);
        if ((uint32_t)i == 0)
            key = codec_key(seed, i);
        bits = encode_block(block, element, vec_set1(largest), key, (uint32_t)i);
        memcpy(blocks + i / BLOCK * sizeof bits, &bits, sizeof bits);
    }
}

struct grid {
    const char *blocks;
    vec s;
    uint32_t all;               // all bits set where every element is s: it is NaN
};

INLINE struct grid grid_load(const void *src)
{
    const float s = canonical_nan(load_f32(src));
    return (struct grid){(const char *)src + CODEC_HEADER, vec_set1(s), s == s ? 0 : UINT32_MAX};
}

INLINE vec dequantize(const struct grid *grid, size_t i, int v)
{
    struct ternary_block bits;
    memcpy(&bits, grid->blocks + i / BLOCK * sizeof bits, sizeof bits);
    return vec_negate(vec_select(grid->s, (bits.kept | grid->all) >> v * LANES), bits.negative >> v * LANES);
}

#include "kernel/decode_vectors.h"

#define TERNARY(element)                                                                                  \
    static void NAME(ternary_encode_##element)(void *dst, const void *src, size_t count,                  \
                                               const struct bhvd_codec_options *options)                  \
    {                                                                                                     \
        encode(dst, src, count, &element, options->seed);                                                 \
    }                                                                                                     \
    DECODERS(ternary, element, grid_load(src))
TERNARY(f32)
TERNARY(f16)
TERNARY(bf16)

void NAME(ternary_kernels_init)(struct kernel_table *table)
{
    CODEC_VECTORS(table, BHVD_CODEC_TERNARY, ternary, ternary);
}
