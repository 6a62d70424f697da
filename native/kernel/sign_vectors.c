// Codecs sign and sign_rms by vectors of float32, a block of 32 elements at a time. The source is read once: the signs do not need
// the scale.
#include "kernel/sign.h"
#include "kernel/variants.h"
#include "kernel/vectors.h"

INLINE uint32_t encode_block(struct sums *sums, const char *block, const struct element *element, int squares)
{
    uint32_t bits = 0;
    for (int v = 0; v < BLOCK / LANES; v++) {
        const vec x = element->load(block + v * LANES * element->size);
        sums_add(sums, v, x, squares);
        bits |= vec_less(x, vec_set1(0)) << v * LANES;
    }
    return bits;
}

// The bits of up to CODEC_SUMS_BLOCK elements, and their sum.
INLINE double encode_summed(uint8_t *bits, const char *src, size_t count, const struct element *element, int squares)
{
    struct sums sums;
    sums_init(&sums);
    size_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) {
        prefetch_block(src + i * element->size, element->size);
        const uint32_t block_bits = encode_block(&sums, src + i * element->size, element, squares);
        memcpy(bits + i / 8, &block_bits, sizeof block_bits);
    }
    if (i < count) {
        char block[BLOCK * sizeof(float)];
        tail_zeros(block, src + i * element->size, count - i, element->size);
        const uint32_t block_bits = encode_block(&sums, block, element, squares);
        memcpy(bits + i / 8, &block_bits, sizeof block_bits);
    }
    return sums_total(sums);
}

INLINE void encode(void *dst, const void *src, size_t count, const struct element *element, int squares)
{
    const char *from = src;
    uint8_t *bits = (uint8_t *)dst + CODEC_HEADER;
    double sums[CODEC_SUMS] = {0};
    memset(bits + count / BLOCK * sizeof(uint32_t), 0, sign_bits_size(count) - count / BLOCK * sizeof(uint32_t));
    size_t begin = 0, block = 0;
    for (; begin + CODEC_SUMS_BLOCK <= count; begin += CODEC_SUMS_BLOCK, block++)
        sums[block % CODEC_SUMS] +=
            encode_summed(bits + begin / 8, from + begin * element->size, CODEC_SUMS_BLOCK, element, squares);
    if (begin < count)
        sums[block % CODEC_SUMS] +=
            encode_summed(bits + begin / 8, from + begin * element->size, count - begin, element, squares);
    const float scale = (float)sign_scale(codec_sums_total(sums), count, squares);
    if (scale != scale)
        memset(bits, 0, sign_bits_size(count));
    codec_header_init(dst, SIGN_VERSION, scale == scale);
    store_f32(dst, scale);
}

struct grid {
    const char *bits;
    vec scale;
};

INLINE struct grid grid_load(const void *src)
{
    return (struct grid){(const char *)src + CODEC_HEADER, vec_set1(canonical_nan(load_f32(src)))};
}

INLINE vec dequantize(const struct grid *grid, size_t i, int v)
{
    uint32_t bits;
    memcpy(&bits, grid->bits + i / 8, sizeof bits);
    return vec_negate(grid->scale, bits >> v * LANES);
}

#include "kernel/decode_vectors.h"

#define SIGN_ENCODE(name, element, squares)                                                               \
    static void NAME(name##_encode_##element)(void *dst, const void *src, size_t count,                   \
                                              const struct bhvd_codec_options *options)                   \
    {                                                                                                     \
        (void)options;                                                                                    \
        encode(dst, src, count, &element, squares);                                                       \
    }
SIGN_ENCODE(sign, f32, 0)
SIGN_ENCODE(sign, f16, 0)
SIGN_ENCODE(sign, bf16, 0)
SIGN_ENCODE(sign_rms, f32, 1)
SIGN_ENCODE(sign_rms, f16, 1)
SIGN_ENCODE(sign_rms, bf16, 1)
DECODERS(sign, f32, grid_load(src))
DECODERS(sign, f16, grid_load(src))
DECODERS(sign, bf16, grid_load(src))

void NAME(sign_kernels_init)(struct kernel_table *table)
{
    CODEC_VECTORS(table, BHVD_CODEC_SIGN, sign, sign);
    CODEC_VECTORS(table, BHVD_CODEC_SIGN_RMS, sign_rms, sign);
}
