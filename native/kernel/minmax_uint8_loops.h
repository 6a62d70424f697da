// Codec minmax_uint8, one element at a time: minmax_uint8.c includes this for each element type as the definition,
// minmax_uint8_vectors.c for float64, which the compiler vectorizes.
#define CODEC(name) NAME(JOIN(minmax_uint8_##name, ELEMENT))

#include "kernel/decode_loops.h"
#include "kernel/range_loops.h"

ENCODE(minmax_uint8, ELEMENT)
{
    const char *from = src;
    uint8_t *codes = (uint8_t *)dst + CODEC_HEADER;
    REAL mn, mx;
    NAME(JOIN(range, ELEMENT))(from, count, &mn, &mx);
    codec_header_init(dst, MINMAX_UINT8_VERSION, mn == mn);
    STORE(dst, mn);
    STORE((char *)dst + SIZE, mx);

    size_t done = 0;
    if (mx > mn) {
        const struct ARITHMETIC(minmax_uint8, grid) grid = ARITHMETIC(minmax_uint8, grid)(mn, mx);
        for (; done < count; done++)
            codes[done] = (uint8_t)(int)ARITHMETIC(minmax_uint8, quantize)(&grid, LOAD(from + SIZE * done));
    }
    memset(codes + done, 0, codec_padded(count) - done);
}

// A chunk of equal elements, or with an element that is not finite, has no grid.
struct CODEC(decoder) {
    const uint8_t *codes;
    struct ARITHMETIC(minmax_uint8, grid) grid;
    REAL mn;
    int has_grid;
};

INLINE struct CODEC(decoder) CODEC(decoder_of)(const void *src)
{
    const REAL mn = LOAD(src), mx = LOAD((const char *)src + SIZE);
    struct CODEC(decoder) decoder = {.codes = (const uint8_t *)src + CODEC_HEADER, .mn = mn, .has_grid = mx > mn};
    if (decoder.has_grid)
        decoder.grid = ARITHMETIC(minmax_uint8, grid)(mn, mx);
    return decoder;
}

INLINE REAL CODEC(decode_one)(const struct CODEC(decoder) *d, size_t i)
{
    return d->has_grid ? ARITHMETIC(minmax_uint8, dequantize)(&d->grid, d->codes[i]) : d->mn;
}

DECODE_LOOPS(minmax_uint8, CODEC(decoder), CODEC(decoder_of)(src), CODEC(decode_one))
