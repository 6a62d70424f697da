// Codec minmax_uint8, one element at a time: minmax_uint8.c includes this for each element type as the definition,
// minmax_uint8_vectors.c for float64, which the compiler vectorizes. The includer defines
//     ISA       suffix of all names
//     ELEMENT   f32, f16, bf16, f64: load_<ELEMENT> and store_<ELEMENT>
//     REAL      float or double, in which to compute
//     REAL_MAX  its largest number
//     SIZE      bytes of an element
#define CODEC(name) NAME(JOIN(minmax_uint8_##name, ELEMENT))
#define LOAD JOIN(load, ELEMENT)
#define STORE JOIN(store, ELEMENT)
#define ARITHMETIC_(real, name) minmax_uint8_##real##_##name
#define ARITHMETIC__(real, name) ARITHMETIC_(real, name)
#define ARITHMETIC(name) ARITHMETIC__(REAL, name)

#include "kernel/decode_loops.h"
#include "kernel/range_loops.h"

static void CODEC(encode)(void *dst, const void *src, size_t count, const struct bhvd_codec_options *options)
{
    (void)options;
    const char *from = src;
    uint8_t *codes = (uint8_t *)dst + CODEC_HEADER;
    REAL mn, mx;
    NAME(JOIN(range, ELEMENT))(from, count, &mn, &mx);
    codec_header_init(dst, MINMAX_UINT8_VERSION, mn == mn);
    STORE(dst, mn);
    STORE((char *)dst + SIZE, mx);

    size_t done = 0;
    if (mx > mn) {
        const struct ARITHMETIC(grid) grid = ARITHMETIC(grid)(mn, mx);
        for (; done < count; done++)
            codes[done] = (uint8_t)(int)ARITHMETIC(quantize)(&grid, LOAD(from + SIZE * done));
    }
    memset(codes + done, 0, codec_padded(count) - done);
}

// A chunk of equal elements, or of one that is not finite, has no grid.
struct CODEC(decoder) {
    const uint8_t *codes;
    struct ARITHMETIC(grid) grid;
    REAL mn;
    int has_grid;
};

INLINE struct CODEC(decoder) CODEC(decoder_of)(const void *src)
{
    const REAL mn = LOAD(src), mx = LOAD((const char *)src + SIZE);
    struct CODEC(decoder) decoder = {.codes = (const uint8_t *)src + CODEC_HEADER, .mn = mn, .has_grid = mx > mn};
    if (decoder.has_grid)
        decoder.grid = ARITHMETIC(grid)(mn, mx);
    return decoder;
}

INLINE REAL CODEC(decode_one)(const struct CODEC(decoder) *d, size_t i)
{
    return d->has_grid ? ARITHMETIC(dequantize)(&d->grid, d->codes[i]) : d->mn;
}

DECODE_LOOPS(minmax_uint8, CODEC(decoder), CODEC(decoder_of)(src), CODEC(decode_one))
