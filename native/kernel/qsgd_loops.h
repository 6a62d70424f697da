// Codec qsgd, one element at a time; see of_element.h.
#define QSGD(name) NAME(JOIN(qsgd_##name, ELEMENT))

#include "kernel/decode_loops.h"

ENCODE(qsgd, ELEMENT)
{
    const char *from = src;
    const int levels = qsgd_levels(options->parameter);
    const size_t norms_size = qsgd_norms_size(count, sizeof(REAL));
    char *norms = (char *)dst + CODEC_HEADER;
    int8_t *codes = (int8_t *)norms + norms_size;
    int is_finite = 1;
    memset(norms, 0, norms_size + codec_padded(count));
    for (size_t begin = 0; begin < count; begin += QSGD_BLOCK) {
        const size_t end = count - begin < QSGD_BLOCK ? count : begin + QSGD_BLOCK;
        double parts[CODEC_SUMS] = {0};
        for (size_t i = begin; i < end; i++) {
            const double x = LOAD(from + SIZE * i);
            parts[i % CODEC_SUMS] += x * x;
        }
        const REAL norm = ARITHMETIC(qsgd, norm)(codec_sums_total(parts), levels, LARGEST);
        const REAL scale = ARITHMETIC(qsgd, scale)(norm, levels);
        const struct codec_key key = codec_key(options->seed, begin);
        memcpy(norms + begin / QSGD_BLOCK * sizeof norm, &norm, sizeof norm);
        is_finite &= norm == norm;
        for (size_t i = begin; i < end && norm > 0; i++) {
            const REAL x = LOAD(from + SIZE * i);
            const float u = codec_uniform(key, (uint32_t)i);
            const int q = (int)ARITHMETIC(qsgd, quantize)(x < 0 ? -x : x, scale, levels, u);
            codes[i] = (int8_t)(x < 0 ? -q : q);
        }
    }
    codec_header_init(dst, QSGD_VERSION, is_finite);
    ((uint8_t *)dst)[QSGD_LEVELS_AT] = (uint8_t)levels;
}

struct QSGD(decoder) {
    const char *norms;
    const int8_t *codes;
    REAL step;
};

INLINE struct QSGD(decoder) QSGD(decoder_of)(const void *src, size_t count)
{
    const char *norms = (const char *)src + CODEC_HEADER;
    return (struct QSGD(decoder)){norms, (const int8_t *)norms + qsgd_norms_size(count, sizeof(REAL)),
                                  1 / (REAL)((const uint8_t *)src)[QSGD_LEVELS_AT]};
}

INLINE REAL QSGD(decode_one)(const struct QSGD(decoder) *d, size_t i)
{
    REAL norm;
    memcpy(&norm, d->norms + i / QSGD_BLOCK * sizeof norm, sizeof norm);
    const REAL x = ARITHMETIC(qsgd, dequantize)(d->codes[i], d->step, norm);
    return x == x ? x : (REAL)NAN;
}

DECODE_LOOPS(qsgd, QSGD(decoder), QSGD(decoder_of)(src, count), QSGD(decode_one))
