// Codecs block8, block4 and float8: elements in blocks, each with its own scale t, so that large numbers reduce the precision of
// their own block only.
//
//     L = 127 (block8), 7 (block4), 448 (float8)     t = max |x| / L over a block        s = 1 / t
//
//     block8, block4    encode: q = sign(x) min(round(|x| s), L)                         decode: x' = q t
//     float8            encode: c = x s as a float of 4 bits of exponent and 3 of mantissa (e4m3), to nearest even
//                       decode: x' = value(c) t
//
// round is rint, to nearest even, or with options.stochastic floor(r + u), u = codec_uniform(seed, i), i the index in the segment
// (codec.h): E x' = x within 2^-17 t and rounding. float8 ignores it. An exact 0 decodes to exactly 0. |x' - x| <= t/2
// (stochastic: t) plus rounding; float8: 2^-4 |x|, or 2^-10 t if that is more. Decoded elements are always within the range of the
// element type.
//
// real is float for float32, float16 and bfloat16, double for float64. t and s are computed in double, then rounded; t is at least
// 2^-126 (double: 2^-1022) unless 0, so that t and s are normal numbers. NaN or infinity in a block: t is NaN, the whole block
// decodes to NaN. Other blocks are unaffected.
//
// Elements of a block: options.parameter, 64, 128, 256 or 512; the last block may be shorter.
//
// Sources: blocks as in qgZ and qwZ of ZeRO++, Wang et al., arXiv:2306.10209, and LoCo, Xie et al., arXiv:2407.04480; float8 as
// in Micikevicius et al., arXiv:2209.05433 (no infinities).
//
// Code layout (codec.h): a header, then t of each block, float32 or float64, then zeros up to a multiple of 32 bytes, then each
// element's code, then zeros up to a multiple of 32 bytes. 8 bits: a byte each: q as int8; or sign, exponent and mantissa.
// 4 bits: 16 bytes for every 32 elements: byte j holds q of element j below, of j + 16 above; negative ones in two's complement.
#include <stdbool.h>

#include "kernel/codec.h"
#include "kernel/loops.h"

enum {
    BLOCKS_VERSION = 1,
    BLOCKS_DEFAULT = 256,               // elements of a block
    BLOCKS_SMALLEST = 64,
    BLOCKS_LARGEST = 512,
    BLOCKS_GROUP = 32,                  // elements whose 4-bit codes are stored together
    E4M3_MANTISSA = 3,                  // bits
    E4M3_BIAS = 7                       // of the exponent
};

// A block format.
struct blocks_format {
    bool is_float;
    int bits, levels;
};

static const struct blocks_format BLOCKS_8 = {false, 8, 127}, BLOCKS_4 = {false, 4, 7}, BLOCKS_E4M3 = {true, 8, 448};

// For each codec: its number, its name in functions, its format.
#define BLOCKS_EACH(of)                             \
    of(BHVD_CODEC_BLOCK8, block8, BLOCKS_8)         \
    of(BHVD_CODEC_BLOCK4, block4, BLOCKS_4)         \
    of(BHVD_CODEC_FLOAT8, float8, BLOCKS_E4M3)

// Elements of a block; 0: the parameter is out of range.
static inline size_t blocks_size(double parameter)
{
    if (parameter == 0)
        return BLOCKS_DEFAULT;
    for (size_t size = BLOCKS_SMALLEST; size <= BLOCKS_LARGEST; size *= 2)
        if (parameter == (double)size)
            return size;
    return 0;
}

// Bytes of the scales, with their padding, and of the codes.
static inline size_t blocks_scales_size(size_t count, size_t size, size_t real_size)
{
    return codec_padded((count / size + (count % size != 0)) * real_size);
}

static inline size_t blocks_codes_size(const struct blocks_format *format, size_t count)
{
    return codec_padded(format->bits == 8 ? count : (count + BLOCKS_GROUP - 1) / BLOCKS_GROUP * (BLOCKS_GROUP / 2));
}

// The nearest float8 to y, ties to even; requires that |y| does not round above the largest.
static inline uint8_t blocks_float_code(float y)
{
    const uint32_t bits = bits_from_float(y), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    const int dropped = 23 - E4M3_MANTISSA;
    if (magnitude < (uint32_t)(128 - E4M3_BIAS) << 23)          // subnormal: a whole multiple of 2^(1 - bias - mantissa)
        return (uint8_t)(sign | (uint32_t)rintf(float_from_bits(magnitude) *
                                                float_from_bits((uint32_t)(126 + E4M3_BIAS + E4M3_MANTISSA) << 23)));
    const uint32_t narrow = magnitude - ((uint32_t)(127 - E4M3_BIAS) << 23);
    return (uint8_t)(sign | (narrow + (1u << (dropped - 1)) - 1 + (narrow >> dropped & 1)) >> dropped);
}

// The value of a code, divided by BLOCKS_FLOAT_SCALE; it fits in a float16. Codes that no encoder writes get the float16's value.
static inline float blocks_float_value(uint8_t code)
{
    return float16_to_float((uint16_t)((code & 0x80) << 8 | (code & 0x7f) << (10 - E4M3_MANTISSA)));
}

#define BLOCKS_FLOAT_SCALE 256          // 2^(15 - bias)

#define BLOCKS_GRID(real, smallest)                                                                          \
    struct real##_grid {                                                                                     \
        real s, t;                      /* s = 0: all codes of the block are 0 */                            \
    };                                                                                                       \
    /* a: max |x|, a NaN where an element is not finite */                                                   \
    INLINE struct real##_grid real##_grid_of(const struct blocks_format *format, real a)                     \
    {                                                                                                        \
        const double t = (double)a / format->levels, step = t < (smallest) ? (smallest) : t;                 \
        const struct real##_grid none = {0, a == a ? 0 : (real)NAN}, grid = {(real)(1 / step), (real)step};  \
        return a > 0 ? grid : none;                                                                          \
    }
BLOCKS_GRID(float, 0x1p-126)
BLOCKS_GRID(double, 0x1p-1022)

// A segment's code, and its parts.
struct code {
    const struct blocks_format *format;
    size_t size;                        // elements of a block
    char *scales;
    uint8_t *codes;
};

INLINE struct code code_at(const struct blocks_format *format, const void *code, size_t count,
                           const struct bhvd_codec_options *options, size_t real_size)
{
    const size_t size = blocks_size(options->parameter);
    char *scales = (char *)(uintptr_t)code + CODEC_HEADER;
    return (struct code){format, size, scales, (uint8_t *)scales + blocks_scales_size(count, size, real_size)};
}

#ifdef VECTORS
// ------------------------------------------------------------- vectors: a block is read twice, the second time from the cache

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

INLINE struct float_grid grid_of_block(const struct blocks_format *format, const char *src, size_t count,
                                              const struct element *element)
{
    float mn, mx;
    range_find(src, count, element, &mn, &mx);
    return float_grid_of(format, -mn > mx ? -mn : mx);
}

// stochastic: from options; a compile-time constant, so that the loop does not reload it for each 32 elements.
INLINE void encode(const struct blocks_format *format, void *dst, const void *src, size_t count,
                   const struct element *element, const struct bhvd_codec_options *options, int stochastic)
{
    const struct code at = code_at(format, dst, count, options, sizeof(float));
    const size_t size = at.size;
    int is_finite = 1;
    if (count > 0)
        memset(at.codes - CODEC_BLOCK, 0, CODEC_BLOCK);         // the scales' padding, before they are written
    if (count > 0 && format->bits == 4)
        memset(at.codes + blocks_codes_size(format, count) - CODEC_BLOCK, 0, CODEC_BLOCK);      // the codes'
    for (size_t begin = 0; begin < count; begin += size) {
        const size_t length = count - begin < size ? count - begin : size;
        const char *from = (const char *)src + begin * element->size;
        uint8_t *to = at.codes + begin * (size_t)format->bits / 8;
        const struct float_grid grid = grid_of_block(format, from, length, element);
        store_f32(at.scales + begin / size * sizeof(float), grid.t);
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
    struct code at;
    int shift;                          // elements of a block: 2^shift
    vec largest;
};

INLINE struct grid grid_load(const struct blocks_format *format, const void *src, size_t count, const struct element *element,
                             const struct bhvd_codec_options *options)
{
    const struct code at = code_at(format, src, count, options, sizeof(float));
    return (struct grid){at, __builtin_ctzll(at.size), vec_set1(element->largest)};
}

// The codes of LANES elements, from i + v LANES on, as bytes; 4-bit codes are sign-extended.
INLINE __m128i code_bytes(const struct grid *grid, size_t i, int v)
{
    if (grid->at.format->bits == 8)
        return vec_load_bytes(grid->at.codes + i + v * LANES);
    const int at = v * LANES;
    const __m128i nibble = _mm_set1_epi8(15), pairs = vec_load_bytes(grid->at.codes + i / 2 + at % 16);
    const __m128i codes = _mm_and_si128(at < 16 ? pairs : _mm_srli_epi16(pairs, 4), nibble);
    const __m128i sign = _mm_set1_epi8(8);
    return _mm_sub_epi8(_mm_xor_si128(codes, sign), sign);
}

INLINE vec dequantize(const void *arg, size_t i, int v)
{
    const struct grid *grid = arg;
    const float t = load_f32(grid->at.scales + (i >> grid->shift) * sizeof t);
    const __m128i bytes = code_bytes(grid, i, v);
    const vec x = grid->at.format->is_float ? float8_values(bytes) * (t * BLOCKS_FLOAT_SCALE) : vec_from_i8(bytes) * t;
    // If one operand is a NaN, vec_min and vec_max return the second.
    return vec_canonical(vec_min(grid->largest, vec_max(-grid->largest, x)));
}

#define BLOCKS_FUNCTIONS(dtype, element, name, format)                  \
    ENCODE(name, element)                                               \
    {                                                                   \
        if (options->stochastic && !format.is_float)                    \
            encode(&format, dst, src, count, &element, options, 1);     \
        else                                                            \
            encode(&format, dst, src, count, &element, options, 0);     \
    }                                                                   \
    DECODERS(name, element, dequantize, grid_load(&format, src, count, &element, options))
#else
// ------------------------------------------------------------------------------- one element at a time: the definition

// Stores the code of element i, over zeros.
INLINE void put(const struct code *at, size_t i, uint8_t code)
{
    const size_t j = i % BLOCKS_GROUP;
    if (at->format->bits == 8)
        at->codes[i] = code;
    else
        at->codes[i / BLOCKS_GROUP * 16 + j % 16] |= (uint8_t)((code & 15) << (j < 16 ? 0 : 4));
}

INLINE int take(const struct code *at, size_t i)
{
    const size_t j = i % BLOCKS_GROUP;
    return at->format->bits == 8 ? at->codes[i] : at->codes[i / BLOCKS_GROUP * 16 + j % 16] >> (j < 16 ? 0 : 4) & 15;
}

#define BLOCKS_LOOPS(element, real)                                                                                           \
    typedef real real_##element;                                                                                              \
    RANGE_LOOP(element, real)                                                                                                 \
    /* The code of one element, in the lower bits. */                                                                         \
    INLINE uint8_t code_##element(const struct blocks_format *format, const struct real##_grid *grid, real x,                 \
                                  int stochastic, float u)                                                                    \
    {                                                                                                                         \
        const real levels = (real)format->levels, r = (x < 0 ? -x : x) * grid->s;                                             \
        if (format->is_float)                                                                                                 \
            return blocks_float_code(sizeof x == sizeof(double) ? float_rounded_to_odd(x * grid->s) : (float)(x * grid->s));  \
        const real rounded = (real)(stochastic ? floor(r + u) : rint(r));                                                     \
        const int q = (int)(rounded < levels ? rounded : levels);                                                             \
        return (uint8_t)(x < 0 ? -q : q);                                                                                     \
    }                                                                                                                         \
    INLINE void encode_##element(const struct blocks_format *format, void *dst, const char *src, size_t count,                \
                                 const struct bhvd_codec_options *options)                                                    \
    {                                                                                                                         \
        const struct code at = code_at(format, dst, count, options, sizeof(real));                                            \
        int is_finite = 1;                                                                                                    \
        memset(at.scales, 0, (size_t)((char *)at.codes - at.scales) + blocks_codes_size(format, count));                      \
        for (size_t begin = 0; begin < count; begin += at.size) {                                                             \
            const size_t end = count - begin < at.size ? count : begin + at.size;                                             \
            real mn, mx;                                                                                                      \
            range_##element(src + sizeof(any_##element) * begin, end - begin, &mn, &mx);                                      \
            const struct real##_grid grid = real##_grid_of(format, -mn > mx ? -mn : mx);                                      \
            const struct codec_key key = codec_key(options->seed, begin);                                                     \
            memcpy(at.scales + begin / at.size * sizeof(real), &grid.t, sizeof(real));                                        \
            is_finite &= grid.t == grid.t;                                                                                    \
            for (size_t i = begin; i < end && grid.s > 0; i++)                                                                \
                put(&at, i, code_##element(format, &grid, load_##element(src + sizeof(any_##element) * i),                    \
                                           options->stochastic != 0, codec_uniform(key, (uint32_t)i)));                       \
        }                                                                                                                     \
        codec_header_init(dst, BLOCKS_VERSION, is_finite);                                                                    \
    }                                                                                                                         \
    INLINE real decode_one_##element(const struct code *at, size_t i)                                                         \
    {                                                                                                                         \
        const struct blocks_format *format = at->format;                                                                      \
        const int code = take(at, i);                                                                                         \
        real t, x;                                                                                                            \
        memcpy(&t, at->scales + i / at->size * sizeof(real), sizeof(real));                                                   \
        if (format->is_float)                                                                                                 \
            x = (real)blocks_float_value((uint8_t)code) * (t * BLOCKS_FLOAT_SCALE);                                           \
        else                                                                                                                  \
            x = (real)(code >> (format->bits - 1) ? code - (1 << format->bits) : code) * t;                                   \
        const real most = (real)LARGEST_##element, bounded = x < -most ? -most : x > most ? most : x;                         \
        return x == x ? bounded : (real)NAN;                                                                                  \
    }
EACH_REAL(BLOCKS_LOOPS)

#define BLOCKS_FUNCTIONS(dtype, element, name, format)                                              \
    ENCODE(name, element) { encode_##element(&format, dst, src, count, options); }                  \
    DECODE_LOOPS(name, element, code, code_at(&format, src, count, options, sizeof(real_##element)), decode_one_##element)
#endif

static size_t encoded_size(const struct blocks_format *format, bhvd_dtype dtype, size_t count,
                           const struct bhvd_codec_options *options)
{
    const size_t real_size = dtype == BHVD_FLOAT64 ? sizeof(double) : sizeof(float), size = blocks_size(options->parameter);
    if (size == 0)
        return 0;
    return CODEC_HEADER + blocks_scales_size(count, size, real_size) + blocks_codes_size(format, count);
}

#define BLOCKS_CODEC(codec, name, format)                                       \
    EACH_TYPE(BLOCKS_FUNCTIONS, name, format)                                   \
    static size_t name##_encoded_size(bhvd_dtype dtype, size_t count, OPTIONS)  \
    {                                                                           \
        return encoded_size(&format, dtype, count, options);                    \
    }
BLOCKS_EACH(BLOCKS_CODEC)

#define BLOCKS_TABLE(codec, name, format) EACH_TYPE(CODEC_SET, codec, BLOCKS_VERSION, name##_encoded_size, name, name)
void NAME(blocks_kernels_init)(struct kernel_table *table)
{
    BLOCKS_EACH(BLOCKS_TABLE)
}
