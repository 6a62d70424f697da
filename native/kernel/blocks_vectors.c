// Block codecs with vectors of float32: a block is read twice, the second time from the cache.
#include "kernel/blocks.h"
#include "kernel/variants.h"
#include "kernel/vectors.h"

// blocks_float_code of LANES numbers.
INLINE whole float8_codes(vec y)
{
    enum { DROPPED = 23 - E4M3_MANTISSA };
    const float least = float_from_bits((uint32_t)(128 - E4M3_BIAS) << 23);
    const float unit = float_from_bits((uint32_t)(126 + E4M3_BIAS + E4M3_MANTISSA) << 23);
    const vec magnitude = vec_abs(y);
    const whole narrow = (whole)magnitude - ((127 - E4M3_BIAS) << 23);
    const whole normal = (narrow + (narrow >> DROPPED & 1) + ((1 << (DROPPED - 1)) - 1)) >> DROPPED;
    const whole subnormal = vec_nearest(magnitude * unit);
    const mask is_subnormal = vec_greater(vec_set1(least), magnitude);
    return ((whole)y >> 24 & 0x80) | (whole)vec_choose(is_subnormal, (vec)normal, (vec)subnormal);
}

// blocks_float_value of LANES codes.
INLINE vec float8_values(__m128i bytes)
{
    typedef uint16_t words __attribute__((vector_size(sizeof(halves))));
    const words codes = (words)halves_from_bytes(bytes);
    return vec_from_halves((halves)((codes & 0x80) << 8 | (codes & 0x7f) << (10 - E4M3_MANTISSA)));
}

struct quantizer {
    vec s, levels;
    struct codec_key key;
    int stochastic;
};

// The codes of LANES elements. u: for stochastic rounding.
INLINE whole quantize(const struct blocks_format *format, vec x, const struct quantizer *with, vec u)
{
    if (format->is_float)
        return float8_codes(x * with->s);
    if (!with->stochastic)
        return vec_nearest(x * with->s);        // no clamp needed: |x| s <= L (1 + 2^-22)
    return vec_truncated(vec_with_sign(vec_min(vec_abs(x) * with->s + u, with->levels), x));
}

// The codes of 32 elements.
INLINE void codes_of(const struct blocks_format *format, const char *block, const struct quantizer *with, uint32_t index,
                     const struct element *element, whole *codes)
{
    vec u[BLOCK_VECTORS] = {{0}};
    if (with->stochastic && !format->is_float)
        vec_uniforms(with->key, index, u);
    for (int v = 0; v < BLOCK_VECTORS; v++)
        codes[v] = quantize(format, element->load(block + v * LANES * element->size), with, u[v]);
}

INLINE void store_codes(const struct blocks_format *format, uint8_t *to, const whole *codes)
{
    if (format->bits == 8) {
        _mm256_storeu_si256((__m256i *)to, format->is_float ? bytes_unsigned(codes) : bytes_signed(codes));
        return;
    }
    whole pairs[BLOCK_VECTORS] = {{0}};
    for (int v = 0; v < BLOCK_VECTORS / 2; v++)
        pairs[v] = (codes[v] & 15) | (codes[v + BLOCK_VECTORS / 2] & 15) << 4;
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(bytes_unsigned(pairs)));
}

INLINE struct blocks_float_grid grid_of_block(const struct blocks_format *format, const char *src, size_t count,
                                              const struct element *element)
{
    float mn, mx;
    range_find(src, count, element, &mn, &mx);
    return blocks_float_grid_of(format, -mn > mx ? -mn : mx);
}

// stochastic: from options; a compile-time constant, so that the loop does not reload it for each 32 elements.
INLINE void encode(const struct blocks_format *format, void *dst, const void *src, size_t count,
                   const struct element *element, const struct bhvd_codec_options *options, int stochastic)
{
    const size_t size = blocks_size(options->parameter), scales_size = blocks_scales_size(count, size, sizeof(float));
    char *scales = (char *)dst + CODEC_HEADER;
    uint8_t *codes = (uint8_t *)scales + scales_size;
    int is_finite = 1;
    if (scales_size > 0)
        memset(codes - CODEC_BLOCK, 0, CODEC_BLOCK);            // the scales' padding, before they are written
    if (count > 0 && format->bits == 4)
        memset(codes + blocks_codes_size(format, count) - CODEC_BLOCK, 0, CODEC_BLOCK);     // the codes'
    for (size_t begin = 0; begin < count; begin += size) {
        const size_t length = count - begin < size ? count - begin : size;
        const char *from = (const char *)src + begin * element->size;
        uint8_t *to = codes + begin * (size_t)format->bits / 8;
        const struct blocks_float_grid grid = grid_of_block(format, from, length, element);
        store_f32(scales + begin / size * sizeof(float), grid.t);
        is_finite &= grid.t == grid.t;
        if (!(grid.s > 0)) {
            memset(to, 0, blocks_codes_size(format, length));
            continue;
        }
        const struct quantizer with = {vec_set1(grid.s), vec_set1((float)format->levels), codec_key(options->seed, begin),
                                       stochastic};
        size_t i = 0;
        for (; i + BLOCK <= length; i += BLOCK) {
            whole found[BLOCK_VECTORS];
            codes_of(format, from + i * element->size, &with, (uint32_t)(begin + i), element, found);
            store_codes(format, to + i * (size_t)format->bits / 8, found);
        }
        if (i < length) {
            char block[BLOCK * sizeof(float)];
            whole found[BLOCK_VECTORS];
            tail_zeros(block, from + i * element->size, length - i, element->size);
            codes_of(format, block, &with, (uint32_t)(begin + i), element, found);
            memset((char *)found + (length - i) * sizeof(uint32_t), 0, (BLOCK - (length - i)) * sizeof(uint32_t));
            store_codes(format, to + i * (size_t)format->bits / 8, found);
        }
    }
    codec_header_init(dst, BLOCKS_VERSION, is_finite);
}

struct grid {
    const struct blocks_format *format;
    const char *scales;
    const uint8_t *codes;
    int shift;                          // elements of a block: 2^shift
    vec largest;
};

INLINE struct grid grid_load(const struct blocks_format *format, const void *src, size_t count, const struct element *element,
                             const struct bhvd_codec_options *options)
{
    const size_t size = blocks_size(options->parameter);
    const char *scales = (const char *)src + CODEC_HEADER;
    return (struct grid){format, scales,
                         (const uint8_t *)scales + blocks_scales_size(count, size, sizeof(float)),
                         __builtin_ctzll(size), vec_set1(element->largest)};
}

// The codes of LANES elements, from i + v LANES on, as bytes; 4-bit codes are sign-extended.
INLINE __m128i code_bytes(const struct grid *grid, size_t i, int v)
{
    if (grid->format->bits == 8)
        return vec_load_bytes(grid->codes + i + v * LANES);
    const int at = v * LANES;
    const __m128i nibble = _mm_set1_epi8(15), pairs = vec_load_bytes(grid->codes + i / 2 + at % 16);
    const __m128i codes = _mm_and_si128(at < 16 ? pairs : _mm_srli_epi16(pairs, 4), nibble);
    const __m128i sign = _mm_set1_epi8(8);
    return _mm_sub_epi8(_mm_xor_si128(codes, sign), sign);
}

INLINE vec dequantize(const struct grid *grid, size_t i, int v)
{
    const float t = load_f32(grid->scales + (i >> grid->shift) * sizeof t);
    const __m128i bytes = code_bytes(grid, i, v);
    const vec x = grid->format->is_float ? float8_values(bytes) * (t * BLOCKS_FLOAT_SCALE) : vec_from_i8(bytes) * t;
    // If one operand is a NaN, vec_min and vec_max return the second.
    return vec_canonical(vec_min(grid->largest, vec_max(-grid->largest, x)));
}

#include "kernel/decode_vectors.h"

#define BLOCKS_FUNCTIONS(dtype, element, name, format)                  \
    ENCODE(name, element)                                               \
    {                                                                   \
        if (options->stochastic && !format.is_float)                    \
            encode(&format, dst, src, count, &element, options, 1);     \
        else                                                            \
            encode(&format, dst, src, count, &element, options, 0);     \
    }                                                                   \
    DECODERS(name, element, grid_load(&format, src, count, &element, options))
#define BLOCKS_CODEC(codec, name, format) EACH_VECTOR_TYPE(BLOCKS_FUNCTIONS, name, format)
BLOCKS_EACH(BLOCKS_CODEC)

#define BLOCKS_VECTORS(codec, name, format) EACH_VECTOR_TYPE(CODEC_SET, codec, name, name)
void NAME(blocks_kernels_init)(struct kernel_table *table)
{
    BLOCKS_EACH(BLOCKS_VECTORS)
}
