// Codecs sign and sign_rms with vectors of float32, a block of 32 elements at a time. The source is read only once, since the signs
// do not depend on the scale.
#include "kernel/sign.h"
#include "kernel/sums_vectors.h"
#include "kernel/variants.h"

INLINE void encode(void *dst, const void *src, size_t count, const struct element *element, int squares)
{
    const char *from = src;
    uint8_t *bits = (uint8_t *)dst + CODEC_HEADER;
    double sums[CODEC_SUMS] = {0};
    memset(bits + count / BLOCK * sizeof(uint32_t), 0, sign_bits_size(count) - count / BLOCK * sizeof(uint32_t));
    size_t begin = 0, block = 0;
    for (; begin + CODEC_SUMS_BLOCK <= count; begin += CODEC_SUMS_BLOCK, block++)
        sums[block % CODEC_SUMS] += sums_of(from + begin * element->size, CODEC_SUMS_BLOCK, element, squares, bits + begin / 8);
    if (begin < count)
        sums[block % CODEC_SUMS] += sums_of(from + begin * element->size, count - begin, element, squares, bits + begin / 8);
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
    return vec_negate(grid->scale, bits, v);
}

#include "kernel/decode_vectors.h"

#define SIGN(dtype, element, name)                                              \
    ENCODE(name, element) { encode(dst, src, count, &element, 0); }             \
    ENCODE(name##_rms, element) { encode(dst, src, count, &element, 1); }       \
    DECODERS(name, element, grid_load(src))
EACH_VECTOR_TYPE(SIGN, sign)

void NAME(sign_kernels_init)(struct kernel_table *table)
{
    EACH_VECTOR_TYPE(CODEC_SET, BHVD_CODEC_SIGN, sign, sign)
    EACH_VECTOR_TYPE(CODEC_SET, BHVD_CODEC_SIGN_RMS, sign_rms, sign)
}
