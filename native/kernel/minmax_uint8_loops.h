// Codec minmax_uint8, one element at a time: minmax_uint8.c includes this for each element type as the definition,
// minmax_uint8_avx2.c for float64, which the compiler vectorizes. The includer defines
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

static void CODEC(decode)(void *dst, const void *src, size_t count, const struct bhvd_codec_options *options)
{
    (void)options;
    const uint8_t *codes = (const uint8_t *)src + CODEC_HEADER;
    char *to = dst;
    const REAL mn = LOAD(src), mx = LOAD((const char *)src + SIZE);
    if (!(mx > mn)) {
        for (size_t i = 0; i < count; i++)
            STORE(to + SIZE * i, mn);
        return;
    }
    const struct ARITHMETIC(grid) grid = ARITHMETIC(grid)(mn, mx);
    for (size_t i = 0; i < count; i++)
        STORE(to + SIZE * i, ARITHMETIC(dequantize)(&grid, codes[i]));
}

// Adds what decode would give, element by element: rounded to the element type first. A float64 is added in double.
static void CODEC(decode_add)(float *dst, const void *src, size_t count, const struct bhvd_codec_options *options)
{
    (void)options;
    const uint8_t *codes = (const uint8_t *)src + CODEC_HEADER;
    char *to = (char *)dst;
    const REAL mn = LOAD(src), mx = LOAD((const char *)src + SIZE);
    if (!(mx > mn)) {
        for (size_t i = 0; i < count; i++)
            store_f32(to + 4 * i, (float)(load_f32(to + 4 * i) + mn));
        return;
    }
    const struct ARITHMETIC(grid) grid = ARITHMETIC(grid)(mn, mx);
    for (size_t i = 0; i < count; i++) {
        char element[SIZE];
        STORE(element, ARITHMETIC(dequantize)(&grid, codes[i]));
        store_f32(to + 4 * i, (float)(load_f32(to + 4 * i) + LOAD(element)));
    }
}

#undef CODEC
#undef LOAD
#undef STORE
#undef ARITHMETIC_
#undef ARITHMETIC__
#undef ARITHMETIC
#undef ELEMENT
#undef REAL
#undef REAL_MAX
#undef LARGEST
#undef SIZE
