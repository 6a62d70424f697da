// Block codecs, one element at a time; see of_element.h.
#define BLOCKS(name) NAME(JOIN(blocks_##name, ELEMENT))

#include "kernel/decode_loops.h"
#include "kernel/range_loops.h"

INLINE struct ARITHMETIC(blocks, grid) BLOCKS(grid)(const struct blocks_format *format, const char *from, size_t count)
{
    REAL mn, mx;
    NAME(JOIN(range, ELEMENT))(from, count, &mn, &mx);
    return ARITHMETIC(blocks, grid_of)(format, -mn > mx ? -mn : mx);
}

// The code of one element, in the lower bits.
INLINE uint8_t BLOCKS(code)(const struct blocks_format *format, const struct ARITHMETIC(blocks, grid) *grid, REAL x, int stochastic,
                            float u)
{
    const REAL levels = (REAL)format->levels;
    if (format->is_float)
        return blocks_float_code(sizeof x == sizeof(double) ? float_rounded_to_odd(x * grid->s) : (float)(x * grid->s));
    const REAL rounded = ARITHMETIC(blocks, rounded)((x < 0 ? -x : x) * grid->s, stochastic, u);
    const int q = (int)ARITHMETIC(blocks, bounded)(rounded, 0, levels);
    return (uint8_t)(x < 0 ? -q : q);
}

INLINE void BLOCKS(encode)(const struct blocks_format *format, void *dst, const void *src, size_t count,
                           const struct bhvd_codec_options *options)
{
    const char *from = src;
    const size_t size = blocks_size(options->parameter), scales_size = blocks_scales_size(count, size, sizeof(REAL));
    char *scales = (char *)dst + CODEC_HEADER;
    uint8_t *codes = (uint8_t *)scales + scales_size;
    const int stochastic = options->stochastic != 0;
    int is_finite = 1;
    memset(scales, 0, scales_size + blocks_codes_size(format, count));
    for (size_t begin = 0; begin < count; begin += size) {
        const size_t end = count - begin < size ? count : begin + size;
        const struct ARITHMETIC(blocks, grid) grid = BLOCKS(grid)(format, from + SIZE * begin, end - begin);
        const struct codec_key key = codec_key(options->seed, begin);
        memcpy(scales + begin / size * sizeof(REAL), &grid.t, sizeof(REAL));
        is_finite &= grid.t == grid.t;
        for (size_t i = begin; i < end && grid.s > 0; i++) {
            const uint8_t code =
                BLOCKS(code)(format, &grid, LOAD(from + SIZE * i), stochastic, codec_uniform(key, (uint32_t)i));
            const size_t j = i % BLOCKS_GROUP;
            if (format->bits == 8)
                codes[i] = code;
            else
                codes[i / BLOCKS_GROUP * 16 + j % 16] |= (uint8_t)((code & 15) << (j < 16 ? 0 : 4));
        }
    }
    codec_header_init(dst, BLOCKS_VERSION, is_finite);
}

struct BLOCKS(decoder) {
    const struct blocks_format *format;
    const char *scales;
    const uint8_t *codes;
    size_t size;
};

INLINE struct BLOCKS(decoder) BLOCKS(decoder_of)(const struct blocks_format *format, const void *src, size_t count,
                                                 const struct bhvd_codec_options *options)
{
    const size_t size = blocks_size(options->parameter);
    const char *scales = (const char *)src + CODEC_HEADER;
    return (struct BLOCKS(decoder)){
        format, scales, (const uint8_t *)scales + blocks_scales_size(count, size, sizeof(REAL)), size};
}

INLINE REAL BLOCKS(decode_one)(const struct BLOCKS(decoder) *d, size_t i)
{
    const struct blocks_format *format = d->format;
    const size_t j = i % BLOCKS_GROUP;
    REAL t, x;
    memcpy(&t, d->scales + i / d->size * sizeof(REAL), sizeof(REAL));
    const int code = format->bits == 8 ? d->codes[i] : d->codes[i / BLOCKS_GROUP * 16 + j % 16] >> (j < 16 ? 0 : 4) & 15;
    if (format->is_float)
        x = (REAL)blocks_float_value((uint8_t)code) * (t * BLOCKS_FLOAT_SCALE);
    else
        x = (REAL)(code >> (format->bits - 1) ? code - (1 << format->bits) : code) * t;
    return x == x ? ARITHMETIC(blocks, bounded)(x, -(REAL)LARGEST, (REAL)LARGEST) : (REAL)NAN;
}

#define BLOCKS_FUNCTIONS(codec, name, format)                                       \
    ENCODE(name, ELEMENT) { BLOCKS(encode)(&format, dst, src, count, options); }    \
    DECODE_LOOPS(name, BLOCKS(decoder), BLOCKS(decoder_of)(&format, src, count, options), BLOCKS(decode_one))
BLOCKS_EACH(BLOCKS_FUNCTIONS)
