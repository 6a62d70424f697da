// Codecs rotated1 to rotated4: the definitions. Formulas and layout: rotated.h.
#include "kernel/rotated.h"

#include <float.h>

#include "kernel/loops.h"

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

#define ISA scalar
#include "kernel/rotated_codes.h"

#define LOOPS "kernel/rotated_loops.h"
#include "kernel/for_each_element.h"

ROTATED_EACH(ROTATED_COEFFICIENTS)

#define ROTATED_ENCODED_SIZE(codec, name, levels)                                                                   \
    static size_t name##_encoded_size(bhvd_dtype dtype, size_t count, const struct bhvd_codec_options *options)     \
    {                                                                                                               \
        const size_t size = rotated_size(options->parameter);                                                       \
        (void)dtype;                                                                                                \
        return size ? CODEC_HEADER + rotated_scales_size(count, size) + rotated_codes_size(levels.bits, count, size) : 0; \
    }
ROTATED_EACH(ROTATED_ENCODED_SIZE)

#define ROTATED_DEFINITIONS(codec, name, levels)                                        \
    EACH_FLOAT_TYPE(CODEC_COMMON, codec, ROTATED_VERSION, name##_encoded_size)          \
    EACH_FLOAT_TYPE(ROTATED_SET, codec, name)

void rotated_kernels_init(struct kernel_table *table)
{
    ROTATED_EACH(ROTATED_DEFINITIONS)
}
