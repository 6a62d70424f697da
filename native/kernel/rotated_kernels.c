// Codecs rotated1 to rotated4, block by block. Formulas and layout: rotated.h.
#include "kernel/rotated.h"

#include <stdbool.h>

#include "kernel/loops.h"

// Not inlined, so that the element types of a codec share them.
#define SHARED static __attribute__((noinline))

// An element type.
struct io {
    size_t size;
    // a = H (signs src), padded with zeros.
    void (*forward)(float *a, const char *src, size_t count, size_t d, const uint32_t *signs);
    // dst = signs H a as elements; adds: in float32, dst += that. Overwrites a.
    void (*inverse)(char *dst, size_t count, float *a, size_t d, const uint32_t *signs, int adds);
    void (*store_one)(void *p, float x);
};

// For the definition and in vectors:
//     squares(a, d)                             the sum of squares of a block; all blocks are float32
//     quantize(levels, codes, a, d, s)          writes the codes; returns sum_i |a_i| L[q_i]. s: the root mean square
//     dequantize(levels, a, codes, d, t, adds)  a = z, or a += z
//     ROTATED_IO(dtype, element)                io_<element>
#ifdef VECTORS
#include "kernel/rotated_vectors.h"
#else
// x with the sign of element i of the block.
INLINE float flipped(float x, const uint32_t *signs, size_t i)
{
    return float_from_bits(bits_from_float(x) ^ signs[i / 32] >> i % 32 << 31);
}

static void transform(float *a, size_t d)
{
    for (size_t h = 1; h < d; h *= 2)
        for (size_t begin = 0; begin < d; begin += 2 * h)
            for (size_t i = begin; i < begin + h; i++) {
                const float x = a[i], y = a[i + h];
                a[i] = x + y;
                a[i + h] = x - y;
            }
}

static float sums_total(float sums[ROTATED_SUMS])
{
    for (int w = ROTATED_SUMS / 2; w > 0; w /= 2)
        for (int j = 0; j < w; j++)
            sums[j] += sums[j + w];
    return sums[0];
}

static float squares(const float *a, size_t d)
{
    float sums[ROTATED_SUMS] = {0};
    for (size_t i = 0; i < d; i++)
        sums[i % ROTATED_SUMS] += a[i] * a[i];
    return sums_total(sums);
}

// Where number i of a part of b-bit numbers is: the word's two bytes, and its bits in them.
struct position {
    size_t byte;
    int shift;
};

INLINE struct position position_of(size_t i, int b)
{
    const size_t each = ROTATED_PACK / (size_t)b, in_part = i % each;
    return (struct position){i / each * ROTATED_PART + in_part % 16 * 2, (int)(in_part / 16) * b};
}

INLINE void put(uint8_t *codes, size_t i, int b, unsigned number)
{
    const struct position at = position_of(i, b);
    codes[at.byte + (size_t)at.shift / 8] |= (uint8_t)(number << at.shift % 8);
}

INLINE unsigned take(const uint8_t *codes, size_t i, int b)
{
    const struct position at = position_of(i, b);
    return (unsigned)codes[at.byte + (size_t)at.shift / 8] >> at.shift % 8 & ((1u << b) - 1);
}

static float quantize(const struct rotated_levels *levels, uint8_t *codes, const float *a, size_t d, float s)
{
    const int bits = levels->bits, steps = (1 << (bits - 1)) - 1;
    float sums[ROTATED_SUMS] = {0};
    memset(codes, 0, d / 8 * (size_t)bits);
    for (size_t i = 0; i < d; i++) {
        const float magnitude = fabsf(a[i]);
        const unsigned negative = bits_from_float(a[i]) >> 31;
        unsigned q = 0;
        for (int k = 0; k < steps; k++)
            q += magnitude > levels->threshold[k] * s;
        sums[i % ROTATED_SUMS] += magnitude * levels->level[q];
        uint8_t *pack = codes + i / ROTATED_PACK * ROTATED_PART * (size_t)bits;
        if (bits == 3) {
            put(pack, i % ROTATED_PACK, 2, q);
            put(pack + 2 * ROTATED_PART, i % ROTATED_PACK, 1, negative);
        } else {
            put(pack, i % ROTATED_PACK, bits, q | negative << (bits - 1));
        }
    }
    return sums_total(sums);
}

static void dequantize(const struct rotated_levels *levels, float *a, const uint8_t *codes, size_t d, float t, int adds)
{
    const int bits = levels->bits;
    for (size_t i = 0; i < d; i++) {
        const uint8_t *pack = codes + i / ROTATED_PACK * ROTATED_PART * (size_t)bits;
        const size_t at = i % ROTATED_PACK;
        const unsigned number = bits == 3 ? take(pack, at, 2) | take(pack + 2 * ROTATED_PART, at, 1) << 2 : take(pack, at, bits);
        const float z = levels->level[number & ((1u << (bits - 1)) - 1)] * t, signed_z = number >> (bits - 1) ? -z : z;
        a[i] = adds ? a[i] + signed_z : signed_z;
    }
}

#define ROTATED_IO(dtype, element, ...)                                                                                        \
    /* Stores x, clamped to the largest number of the element type; only a float16 can need it. */                             \
    INLINE void store_one_##element(void *p, float x)                                                                          \
    {                                                                                                                          \
        const float largest = (float)(LARGEST_##element < FLT_MAX ? LARGEST_##element : FLT_MAX);                              \
        store_##element(p, x > largest ? largest : x < -largest ? -largest : x);                                               \
    }                                                                                                                          \
    SHARED void forward_##element(float *a, const char *src, size_t count, size_t d, const uint32_t *signs)                    \
    {                                                                                                                          \
        for (size_t i = 0; i < d; i++)                                                                                         \
            a[i] = flipped(i < count ? (float)load_##element(src + sizeof(any_##element) * i) : 0, signs, i);                  \
        transform(a, d);                                                                                                       \
    }                                                                                                                          \
    SHARED void inverse_##element(char *dst, size_t count, float *a, size_t d, const uint32_t *signs, int adds)                \
    {                                                                                                                          \
        transform(a, d);                                                                                                       \
        for (size_t i = 0; i < count; i++) {                                                                                   \
            char x[sizeof(any_##element)];                                                                                     \
            store_one_##element(adds ? x : dst + sizeof x * i, flipped(a[i], signs, i));                                       \
            if (adds)                                                                                                          \
                store_f32(dst + 4 * i, (float)(load_f32(dst + 4 * i) + load_##element(x)));                                    \
        }                                                                                                                      \
    }                                                                                                                          \
    static const struct io io_##element = {sizeof(any_##element), forward_##element, inverse_##element, store_one_##element};
#endif

// ------------------------------------------------------------------------------------------------------------- blocks

struct coder {
    const struct rotated_levels *levels;
    float (*quantize)(uint8_t *codes, const float *a, size_t d, float s);
    void (*dequantize)(float *a, const uint8_t *codes, size_t d, float t, int adds);
};

#define ROTATED_CODER(codec, name, levels)                                                                          \
    SHARED float name##_quantize(uint8_t *codes, const float *a, size_t d, float s)                           \
    {                                                                                                               \
        return quantize(&levels, codes, a, d, s);                                                                   \
    }                                                                                                               \
    SHARED void name##_dequantize(float *a, const uint8_t *codes, size_t d, float t, int adds)                \
    {                                                                                                               \
        if (adds)                                                                                                   \
            dequantize(&levels, a, codes, d, t, 1);                                                                 \
        else                                                                                                        \
            dequantize(&levels, a, codes, d, t, 0);                                                                 \
    }                                                                                                               \
    static const struct coder name##_coder = {&levels, name##_quantize, name##_dequantize};
ROTATED_EACH(ROTATED_CODER)

// The parts of a segment's code.
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

// Writes elements that are all 0, or all NaN. adds: to float32, without io.
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
            fill(NULL, (char *)(sum + begin), d, (float)NAN, 1);
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

EACH_TYPE(ROTATED_IO, )

#define ROTATED_FUNCTIONS(dtype, element, name)                                                                                 \
    ENCODE(name, element) { encode(&name##_coder, &io_##element, dst, src, NULL, count, options->seed, options); }              \
    DECODE(name, element) { decode(&name##_coder, &io_##element, dst, src, count, options, 0); }                                \
    DECODE_ADD(name, element) { decode(&name##_coder, &io_##element, dst, src, count, options, 1); }                            \
    static void name##_invert_##element(void *dst, float *coefficients, size_t count, const void *like, OPTIONS)                \
    {                                                                                                                           \
        invert(&io_##element, dst, coefficients, count, like, options);                                                         \
    }
#define ROTATED_CODEC(codec, name, levels)                                                                                      \
    static size_t name##_encoded_size(bhvd_dtype dtype, size_t count, OPTIONS)                                                  \
    {                                                                                                                           \
        const size_t size = rotated_size(options->parameter);                                                                   \
        (void)dtype;                                                                                                            \
        return size ? CODEC_HEADER + rotated_scales_size(count, size) + rotated_codes_size(levels.bits, count, size) : 0;       \
    }                                                                                                                           \
    EACH_TYPE(ROTATED_FUNCTIONS, name)                                                                                          \
    static void name##_coefficients_add(float *sum, const void *src, size_t count, OPTIONS)                                     \
    {                                                                                                                           \
        coefficients_add(&name##_coder, sum, src, count, options);                                                              \
    }                                                                                                                           \
    static void name##_coefficients_encode(void *dst, float *coefficients, size_t count, const void *like, OPTIONS)             \
    {                                                                                                                           \
        encode(&name##_coder, NULL, dst, NULL, coefficients, count, rotated_key(like), options);                                \
    }
ROTATED_EACH(ROTATED_CODEC)

#define ROTATED_SET(dtype, element, codec, name)                                                                                \
    CODEC_SET(dtype, element, codec, ROTATED_VERSION, name##_encoded_size, name, name)                                          \
    table->codecs[codec][dtype].transform = (struct kernel_transform){                                                          \
        rotated_coefficients, rotated_are_alike, name##_coefficients_add, name##_coefficients_encode, name##_invert_##element};
#define ROTATED_TABLE(codec, name, levels) EACH_TYPE(ROTATED_SET, codec, name)

void NAME(rotated_kernels_init)(struct kernel_table *table)
{
    ROTATED_EACH(ROTATED_TABLE)
}
