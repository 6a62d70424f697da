// Codec qsgd with vectors of float32: a block of 512 elements is read twice, the second time from the cache.
#include "kernel/qsgd.h"
#include "kernel/sums_vectors.h"
#include "kernel/variants.h"

struct quantizer {
    vec scale, levels;
    struct codec_key key;
};

INLINE void encode_block(char *codes, const char *block, const struct quantizer *with, uint32_t index,
                         const struct element *element)
{
    vec q[BLOCK_VECTORS];
    vec_uniforms(with->key, index, q);
    for (int v = 0; v < BLOCK_VECTORS; v++) {
        const vec x = element->load(block + v * LANES * element->size);
        q[v] = vec_with_sign(vec_min(vec_abs(x) * with->scale + q[v], with->levels), x);
    }
    _mm256_storeu_si256((void *)codes, vec_truncated_to_i8(q));
}

INLINE void encode(void *dst, const void *src, size_t count, const struct element *element,
                   const struct bhvd_codec_options *options)
{
    const int levels = qsgd_levels(options->parameter);
    const size_t norms_size = qsgd_norms_size(count, sizeof(float));
    char *norms = (char *)dst + CODEC_HEADER, *codes = norms + norms_size;
    int is_finite = 1;
    memset(norms + count / QSGD_BLOCK * sizeof(float), 0, norms_size - count / QSGD_BLOCK * sizeof(float));
    for (size_t begin = 0; begin < count; begin += QSGD_BLOCK) {
        const size_t length = count - begin < QSGD_BLOCK ? count - begin : QSGD_BLOCK;
        const char *from = (const char *)src + begin * element->size;
        const float norm = qsgd_float_norm(sums_of(from, length, element, 1, NULL), levels, element->largest);
        store_f32(norms + begin / QSGD_BLOCK * sizeof norm, norm);
        is_finite &= norm == norm;
        if (!(norm > 0)) {
            memset(codes + begin, 0, codec_padded(length));
            continue;
        }
        const struct quantizer with = {vec_set1(qsgd_float_scale(norm, levels)), vec_set1((float)levels),
                                       codec_key(options->seed, begin)};
        size_t i = 0;
        for (; i + BLOCK <= length; i += BLOCK)
            encode_block(codes + begin + i, from + i * element->size, &with, (uint32_t)(begin + i), element);
        if (i < length) {
            char block[BLOCK * sizeof(float)];
            tail_zeros(block, from + i * element->size, length - i, element->size);
            encode_block(codes + begin + i, block, &with, (uint32_t)(begin + i), element);
        }
    }
    codec_header_init(dst, QSGD_VERSION, is_finite);
    ((uint8_t *)dst)[QSGD_LEVELS_AT] = (uint8_t)levels;
}

struct grid {
    const char *norms;
    const uint8_t *codes;
    vec step;
};

INLINE struct grid grid_load(const void *src, size_t count)
{
    const uint8_t *norms = (const uint8_t *)src + CODEC_HEADER;
    const vec step = vec_set1(1 / (float)((const uint8_t *)src)[QSGD_LEVELS_AT]);
    return (struct grid){(const char *)norms, norms + qsgd_norms_size(count, sizeof(float)), step};
}

INLINE vec dequantize(const struct grid *grid, size_t i, int v)
{
    const vec norm = vec_set1(load_f32(grid->norms + i / QSGD_BLOCK * sizeof(float)));
    return vec_canonical(vec_from_i8(vec_load_bytes(grid->codes + i + v * LANES)) * grid->step * norm);
}

#include "kernel/decode_vectors.h"

#define QSGD(dtype, element, name)                                              \
    ENCODE(name, element) { encode(dst, src, count, &element, options); }       \
    DECODERS(name, element, grid_load(src, count))
EACH_VECTOR_TYPE(QSGD, qsgd)

void NAME(qsgd_kernels_init)(struct kernel_table *table)
{
    EACH_VECTOR_TYPE(CODEC_SET, BHVD_CODEC_QSGD, qsgd, qsgd)
}
