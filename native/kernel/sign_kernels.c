// Codecs sign and sign_rms. Formula and layout: sign.h.
//
// With vectors, a block of 32 elements at a time. The source is read only once, since the signs do not depend on the scale.
#include "kernel/sign.h"

#include "kernel/loops.h"

#ifdef VECTORS
#include "kernel/vectors.h"

// Sums in the order of codec.h: partial sum j is a lane.
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

// The sum of up to CODEC_SUMS_BLOCK elements; also stores their signs.
INLINE double sums_of(const char *src, size_t count, const struct element *element, int squares, uint8_t *bits)
{
    wide sums[SUMS_WIDES] = {{0}};
    char last[BLOCK * sizeof(float)];
    size_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) {
        prefetch_block(src + i * element->size, element->size);
        const uint32_t signs = sums_add_block(sums, src + i * element->size, element, squares);
        memcpy(bits + i / 8, &signs, sizeof signs);
    }
    if (i < count) {
        tail_zeros(last, src + i * element->size, count - i, element->size);
        const uint32_t signs = sums_add_block(sums, last, element, squares);
        memcpy(bits + i / 8, &signs, sizeof signs);
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

INLINE vec dequantize(const void *arg, size_t i, int v)
{
    const struct grid *grid = arg;
    uint32_t bits;
    memcpy(&bits, grid->bits + i / 8, sizeof bits);
    return vec_negate(grid->scale, bits, v);
}

#define SIGN(dtype, element, name)                                              \
    ENCODE(name, element) { encode(dst, src, count, &element, 0); }             \
    ENCODE(name##_rms, element) { encode(dst, src, count, &element, 1); }       \
    DECODERS(name, element, dequantize, grid_load(src))
EACH_VECTOR_TYPE(SIGN, sign)
#else
// One element at a time: the definition.
#define SIGN_LOOPS(element, real)                                                                        \
    INLINE void encode_##element(void *dst, const void *src, size_t count, int squares)                  \
    {                                                                                                    \
        const char *from = src;                                                                          \
        uint8_t *bits = (uint8_t *)dst + CODEC_HEADER;                                                   \
        double sums[CODEC_SUMS] = {0};                                                                   \
        memset(bits, 0, sign_bits_size(count));                                                          \
        for (size_t begin = 0, block = 0; begin < count; begin += CODEC_SUMS_BLOCK, block++) {           \
            const size_t end = count - begin < CODEC_SUMS_BLOCK ? count : begin + CODEC_SUMS_BLOCK;      \
            double parts[CODEC_SUMS] = {0};                                                              \
            for (size_t i = begin; i < end; i++) {                                                       \
                const double x = load_##element(from + sizeof(any_##element) * i), magnitude = fabs(x);  \
                parts[i % CODEC_SUMS] += squares ? magnitude * magnitude : magnitude;                    \
                bits[i / 8] |= (uint8_t)((x < 0) << i % 8);                                              \
            }                                                                                            \
            sums[block % CODEC_SUMS] += codec_sums_total(parts);                                         \
        }                                                                                                \
        const real scale = (real)sign_scale(codec_sums_total(sums), count, squares);                     \
        if (scale != scale)                                                                              \
            memset(bits, 0, sign_bits_size(count));                                                      \
        codec_header_init(dst, SIGN_VERSION, scale == scale);                                            \
        memcpy(dst, &scale, sizeof scale);                                                               \
    }                                                                                                    \
    ENCODE(sign, element) { encode_##element(dst, src, count, 0); }                                      \
    ENCODE(sign_rms, element) { encode_##element(dst, src, count, 1); }                                  \
    struct decoder_##element {                                                                           \
        const uint8_t *bits;                                                                             \
        real scale;                                                                                      \
    };                                                                                                   \
    INLINE struct decoder_##element decoder_of_##element(const void *src)                                \
    {                                                                                                    \
        struct decoder_##element d = {.bits = (const uint8_t *)src + CODEC_HEADER};                      \
        memcpy(&d.scale, src, sizeof d.scale);                                                           \
        d.scale = d.scale == d.scale ? d.scale : (real)NAN;                                              \
        return d;                                                                                        \
    }                                                                                                    \
    INLINE real decode_one_##element(const struct decoder_##element *d, size_t i)                        \
    {                                                                                                    \
        return d->bits[i / 8] >> i % 8 & 1 ? -d->scale : d->scale;                                       \
    }                                                                                                    \
    DECODE_LOOPS(sign, element, decoder_##element, decoder_of_##element(src), decode_one_##element)
EACH_REAL(SIGN_LOOPS)
#endif

static size_t sign_encoded_size(bhvd_dtype dtype, size_t count, const struct bhvd_codec_options *options)
{
    (void)dtype, (void)options;
    return CODEC_HEADER + sign_bits_size(count);
}

void NAME(sign_kernels_init)(struct kernel_table *table)
{
    EACH_TYPE(CODEC_SET, BHVD_CODEC_SIGN, SIGN_VERSION, sign_encoded_size, sign, sign)
    EACH_TYPE(CODEC_SET, BHVD_CODEC_SIGN_RMS, SIGN_VERSION, sign_encoded_size, sign_rms, sign)
}
