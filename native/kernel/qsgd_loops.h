// Codec qsgd, one element at a time. What the includer defines: for_each_element.h.
#define LOAD JOIN(load, ELEMENT)
#define STORE JOIN(store, ELEMENT)
#define QSGD(name) NAME(JOIN(qsgd_##name, ELEMENT))
#define ARITHMETIC_(real, name) qsgd_##real##_##name
#define ARITHMETIC__(real, name) ARITHMETIC_(real, name)
#define ARITHMETIC(name) ARITHMETIC__(REAL, name)

static void QSGD(encode)(void *dst, const void *src, size_t count, const struct bhvd_codec_options *options)
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
        const REAL norm = ARITHMETIC(norm)(codec_sums_total(parts), levels, LARGEST);
        const REAL scale = ARITHMETIC(scale)(norm, levels);
        const struct codec_key key = codec_key(options->seed, begin);
        memcpy(norms + begin / QSGD_BLOCK * sizeof norm, &norm, sizeof norm);
        is_finite &= norm == norm;
        for (size_t i = begin; i < end && norm > 0; i++) {
            const REAL x = LOAD(from + SIZE * i);
            const float u = codec_uniform(key, (uint32_t)i);
            const int q = (int)ARITHMETIC(quantize)(x < 0 ? -x : x, scale, levels, u);
            codes[i] = (int8_t)(x < 0 ? -q : q);
        }
    }
    codec_header_init(dst, QSGD_VERSION, is_finite);
    ((uint8_t *)dst)[QSGD_LEVELS_AT] = (uint8_t)levels;
}

// Element i as it is decoded, into `element`.
INLINE void QSGD(decode_one)(char *element, const void *src, size_t i, size_t count)
{
    const char *norms = (const char *)src + CODEC_HEADER;
    const int8_t *codes = (const int8_t *)norms + qsgd_norms_size(count, sizeof(REAL));
    const REAL step = 1 / (REAL)((const uint8_t *)src)[QSGD_LEVELS_AT];
    REAL norm;
    memcpy(&norm, norms + i / QSGD_BLOCK * sizeof norm, sizeof norm);
    const REAL x = ARITHMETIC(dequantize)(codes[i], step, norm);
    STORE(element, x == x ? x : (REAL)NAN);
}

static void QSGD(decode)(void *dst, const void *src, size_t count, const struct bhvd_codec_options *options)
{
    (void)options;
    for (size_t i = 0; i < count; i++)
        QSGD(decode_one)((char *)dst + SIZE * i, src, i, count);
}

static void QSGD(decode_add)(float *dst, const void *src, size_t count, const struct bhvd_codec_options *options)
{
    char *to = (char *)dst;
    (void)options;
    for (size_t i = 0; i < count; i++) {
        char element[SIZE];
        QSGD(decode_one)(element, src, i, count);
        store_f32(to + 4 * i, (float)(load_f32(to + 4 * i) + LOAD(element)));
    }
}

#undef LOAD
#undef STORE
#undef QSGD
#undef ARITHMETIC_
#undef ARITHMETIC__
#undef ARITHMETIC
#undef ELEMENT
#undef REAL
#undef REAL_MAX
#undef LARGEST
#undef SIZE
