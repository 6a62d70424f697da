// Codecs rotated1 to rotated4, block by block, for any instruction set and element type. The includer defines, for ISA,
//     squares(a, d)                             the sum of squares of a block; all blocks are float32
//     quantize(levels, codes, a, d, s)          writes the codes; returns sum_i |a_i| L[q_i]. s: the root mean square
//     dequantize(levels, a, codes, d, t, adds)  a = z, or a += z
// and, for each element type, NAME(rotated_io_<element>).
#include <float.h>

#include "kernel/functions.h"

// Not inlined, so that the element types of a codec share them.
#define SHARED static __attribute__((noinline))

struct coder {
    const struct rotated_levels *levels;
    float (*quantize)(uint8_t *codes, const float *a, size_t d, float s);
    void (*dequantize)(float *a, const uint8_t *codes, size_t d, float t, int adds);
};

#define ROTATED_CODER(codec, name, levels)                                                                          \
    SHARED float NAME(name##_quantize)(uint8_t *codes, const float *a, size_t d, float s)                           \
    {                                                                                                               \
        return quantize(&levels, codes, a, d, s);                                                                   \
    }                                                                                                               \
    SHARED void NAME(name##_dequantize)(float *a, const uint8_t *codes, size_t d, float t, int adds)                \
    {                                                                                                               \
        if (adds)                                                                                                   \
            dequantize(&levels, a, codes, d, t, 1);                                                                 \
        else                                                                                                        \
            dequantize(&levels, a, codes, d, t, 0);                                                                 \
    }                                                                                                               \
    static const struct coder NAME(name##_coder) = {&levels, NAME(name##_quantize), NAME(name##_dequantize)};
ROTATED_EACH(ROTATED_CODER)

struct io {
    size_t size;
    // a = H (signs src), padded with zeros.
    void (*forward)(float *a, const char *src, size_t count, size_t d, const uint32_t *signs);
    // dst = signs H a as elements; adds: in float32, dst += that. Overwrites a.
    void (*inverse)(char *dst, size_t count, float *a, size_t d, const uint32_t *signs, int adds);
    void (*store_one)(void *p, float x);
};
static const struct io COEFFICIENTS = {.size = sizeof(float)};

// The parts of a chunk's code.
struct codes {
    int bits;
    size_t count, size;
    char *scales;
    uint8_t *codes;
};

INLINE struct codes codes_at(const struct coder *coder, const void *code, size_t count,
                             const struct bhvd_codec_options *options)
{
    const size_t size = rotated_size(options->parameter);
    char *scales = (char *)(uintptr_t)code + CODEC_HEADER;
    return (struct codes){coder->levels->bits, count, size, scales, (uint8_t *)scales + rotated_scales_size(count, size)};
}

INLINE uint8_t *codes_of_block(const struct codes *at, size_t begin)
{
    return at->codes + begin / 8 * (size_t)at->bits;
}

INLINE char *scale_of_block(const struct codes *at, size_t begin)
{
    return at->scales + begin / at->size * sizeof(float);
}

// Multiplies a by a power of two, so that the largest |a_i| is in [1, 2). Returns the factor; 0: all are 0; NaN: one is not finite.
SHARED double normalize(float *a, size_t d)
{
    float largest = 0;
    for (size_t i = 0; i < d; i++) {
        if (!(fabsf(a[i]) <= FLT_MAX))
            return (double)NAN;
        largest = fabsf(a[i]) > largest ? fabsf(a[i]) : largest;
    }
    if (largest == 0)
        return 0;
    const double factor = rotated_factor(largest);
    for (size_t i = 0; i < d; i++)
        a[i] = (float)(a[i] * factor);
    return factor;
}

// A block with the coefficients a / scale.
struct block {
    size_t begin, d;
    float *a;
    double scale;               // 0: all are 0; NaN: one is not finite
    float sum, root;            // of squares; root mean square
};

SHARED struct block block_of(size_t begin, size_t d, float *a, double scale)
{
    struct block block = {begin, d, a, scale, squares(a, d), 0};
    if (!rotated_is_regular(block.sum)) {
        block.scale *= normalize(a, d);
        block.sum = squares(a, d);
    }
    block.root = sqrtf(block.sum / (float)d);
    return block;
}

// Returns t.
INLINE float encode_block(const struct coder *coder, uint8_t *codes, const struct block *block)
{
    if (block->scale > 0)
        return rotated_scale((double)block->sum / coder->quantize(codes, block->a, block->d, block->root) / block->scale);
    memset(codes, 0, block->d / 8 * (size_t)coder->levels->bits);
    return (float)block->scale;
}

// Encodes coefficients, or src if they are NULL.
SHARED void encode(const struct coder *coder, const struct io *io, void *dst, const void *src, float *coefficients, size_t count,
                   uint64_t key, const struct bhvd_codec_options *options)
{
    const struct codes at = codes_at(coder, dst, count, options);
    _Alignas(64) float blocks[2][ROTATED_LARGEST_BLOCK];
    int is_finite = 1;
    if (count)
        memset(at.codes - CODEC_BLOCK, 0, CODEC_BLOCK);     // the scales' padding
    struct block before = {0};
    // Each block is encoded after the next one is transformed: then the processor need not wait for its root.
    for (size_t begin = 0, n = 0; begin < count || before.a; begin += at.size, n++) {
        struct block next = {0};
        if (begin < count) {
            const size_t left = count - begin, d = rotated_block(left, at.size);
            float *a = coefficients ? coefficients + begin : blocks[n % 2];
            uint32_t signs[ROTATED_LARGEST_BLOCK / 32];
            if (!coefficients) {
                rotated_signs(signs, key, begin, d);
                io->forward(a, (const char *)src + begin * io->size, left < d ? left : d, d, signs);
            }
            next = block_of(begin, d, a, coefficients ? 1 : (double)d);
        }
        if (before.a) {
            const float t = encode_block(coder, codes_of_block(&at, before.begin), &before);
            store_f32(scale_of_block(&at, before.begin), t);
            is_finite &= t == t;
        }
        before = next;
    }
    codec_header_init(dst, ROTATED_VERSION, is_finite);
    memcpy(dst, &key, sizeof key);
}

// Writes elements that are all 0, or all NaN.
INLINE void fill(const struct io *io, char *dst, size_t count, float value, int adds)
{
    for (size_t i = 0; i < count; i++) {
        if (!adds)
            io->store_one(dst + i * io->size, value);
        else if (value != value)
            store_f32(dst + i * sizeof(float), value);
    }
}

SHARED void decode(const struct coder *coder, const struct io *io, void *dst, const void *src, size_t count,
                   const struct bhvd_codec_options *options, int adds)
{
    const struct codes at = codes_at(coder, src, count, options);
    const uint64_t key = rotated_key(src);
    for (size_t begin = 0; begin < count; begin += at.size) {
        const size_t left = count - begin, d = rotated_block(left, at.size), here = left < d ? left : d;
        const float t = load_f32(scale_of_block(&at, begin));
        char *to = (char *)dst + begin * (adds ? sizeof(float) : io->size);
        _Alignas(64) float a[ROTATED_LARGEST_BLOCK];
        uint32_t signs[ROTATED_LARGEST_BLOCK / 32];
        if (t == 0 || !rotated_is_bounded(t)) {
            fill(io, to, here, t == 0 ? 0 : (float)NAN, adds);
            continue;
        }
        rotated_signs(signs, key, begin, d);
        coder->dequantize(a, codes_of_block(&at, begin), d, t, 0);
        io->inverse(to, here, a, d, signs, adds);
    }
}

// ------------------------------------------------------------------------------------------------ struct kernel_transform

INLINE size_t rotated_coefficients(size_t count, const struct bhvd_codec_options *options)
{
    return rotated_count(count, rotated_size(options->parameter));
}

INLINE bool rotated_are_alike(const void *a, const void *b) { return rotated_key(a) == rotated_key(b); }

SHARED void coefficients_add(const struct coder *coder, float *sum, const void *src, size_t count,
                             const struct bhvd_codec_options *options)
{
    const struct codes at = codes_at(coder, src, count, options);
    for (size_t begin = 0; begin < count; begin += at.size) {
        const size_t d = rotated_block(count - begin, at.size);
        const float t = load_f32(scale_of_block(&at, begin));
        if (!rotated_is_bounded(t))
            fill(&COEFFICIENTS, (char *)(sum + begin), d, (float)NAN, 1);
        else if (t != 0)
            coder->dequantize(sum + begin, codes_of_block(&at, begin), d, t, 1);
    }
}

SHARED void invert(const struct io *io, void *dst, float *coefficients, size_t count, const void *like,
                   const struct bhvd_codec_options *options)
{
    const size_t size = rotated_size(options->parameter);
    for (size_t begin = 0; begin < count; begin += size) {
        const size_t left = count - begin, d = rotated_block(left, size), here = left < d ? left : d;
        char *to = (char *)dst + begin * io->size;
        uint32_t signs[ROTATED_LARGEST_BLOCK / 32];
        int is_bounded = 1, is_zero = 1;
        for (size_t i = begin; i < begin + d; i++) {
            is_bounded &= rotated_is_bounded(coefficients[i]);
            is_zero &= coefficients[i] == 0;
        }
        if (is_zero || !is_bounded) {
            fill(io, to, here, is_zero ? 0 : (float)NAN, 0);
            continue;
        }
        rotated_signs(signs, rotated_key(like), begin, d);
        io->inverse(to, here, coefficients + begin, d, signs, 0);
    }
}

// ----------------------------------------------------------------------------------------------------------------- table

// The functions of a codec for an element type: <name>_encode_<element>_<isa> ...; rotated_io_<element>_<isa> must exist.
#define ROTATED_FUNCTIONS_OF(dtype, element, name)                                                                              \
    ENCODE(name, element)                                                                                                       \
    {                                                                                                                           \
        encode(&NAME(name##_coder), &NAME(JOIN(rotated_io, element)), dst, src, NULL, count, options->seed, options);           \
    }                                                                                                                           \
    DECODE(name, element) { decode(&NAME(name##_coder), &NAME(JOIN(rotated_io, element)), dst, src, count, options, 0); }       \
    DECODE_ADD(name, element) { decode(&NAME(name##_coder), &NAME(JOIN(rotated_io, element)), dst, src, count, options, 1); }   \
    static void NAME(JOIN(name##_invert, element))(void *dst, float *coefficients, size_t count, const void *like, OPTIONS)     \
    {                                                                                                                           \
        invert(&NAME(JOIN(rotated_io, element)), dst, coefficients, count, like, options);                                      \
    }

// The functions that need only coefficients.
#define ROTATED_COEFFICIENTS(codec, name, levels)                                                                               \
    static void NAME(name##_coefficients_add)(float *sum, const void *src, size_t count, OPTIONS)                               \
    {                                                                                                                           \
        coefficients_add(&NAME(name##_coder), sum, src, count, options);                                                        \
    }                                                                                                                           \
    static void NAME(name##_coefficients_encode)(void *dst, float *coefficients, size_t count, const void *like, OPTIONS)       \
    {                                                                                                                           \
        encode(&NAME(name##_coder), NULL, dst, NULL, coefficients, count, rotated_key(like), options);                          \
    }

#define ROTATED_SET(dtype, element, codec, name)                                                                        \
    CODEC_SET(dtype, element, codec, name, name)                                                                        \
    table->codecs[codec][dtype].transform = (struct kernel_transform)                                                   \
    {                                                                                                                   \
        rotated_coefficients, rotated_are_alike, NAME(name##_coefficients_add), NAME(name##_coefficients_encode),       \
            NAME(JOIN(name##_invert, element))                                                                          \
    };
