// Codecs float16 and bfloat16, and casts between float32 and the other floating point types: the definitions. dst and src do
// not overlap, except that the float32 copy may be in place.
//
// Each element is rounded to a 16-bit float, to nearest even. Numbers that are too large become infinities; infinities and NaNs
// are kept. A float64 is rounded once, not through float32. Code layout: the elements, no header; an empty chunk has no bytes.
#include "kernel/functions.h"
#include "kernel/of_element.h"

#define ISA scalar

typedef float (*load_fn)(const void *p);
typedef void (*store_fn)(void *p, float x);

INLINE void convert(void *dst, size_t dst_size, const void *src, size_t src_size, size_t count, load_fn load,
                    store_fn store)
{
    INDEPENDENT for (size_t i = 0; i < count; i++)
        store((char *)dst + dst_size * i, load((const char *)src + src_size * i));
}

INLINE void convert_add(float *dst, const void *src, size_t count, load_fn load_code, load_fn load, store_fn store)
{
    char *to = (char *)dst;
    INDEPENDENT for (size_t i = 0; i < count; i++) {
        char element[sizeof(double)];
        store(element, load_code((const char *)src + 2 * i));
        store_f32(to + 4 * i, load_f32(to + 4 * i) + load(element));
    }
}

static float load_odd_f64(const void *p) { return float_rounded_to_odd(load_f64(p)); }
static void store_wide_f64(void *p, float x) { store_f64(p, x); }

// An element type as codec `code`, f16 or bf16.
#define HALF(dtype, element, code, load, store)                                                             \
    ENCODE(code, element) { convert(dst, 2, src, SIZE_##element, count, load##element, store_##code); }     \
    DECODE(code, element) { convert(dst, SIZE_##element, src, 2, count, load_##code, store##element); }     \
    DECODE_ADD(code, element) { convert_add(dst, src, count, load_##code, load##element, store##element); }
EACH_VECTOR_TYPE(HALF, f16, load_, store_)
EACH_VECTOR_TYPE(HALF, bf16, load_, store_)
HALF(BHVD_FLOAT64, f64, f16, load_odd_, store_wide_)
HALF(BHVD_FLOAT64, f64, bf16, load_odd_, store_wide_)

static size_t half_encoded_size(bhvd_dtype dtype, size_t count, OPTIONS)
{
    (void)dtype;
    return 2 * count;
}

static void to_float_f32(float *dst, const void *src, size_t count)
{
    if (dst != src && count > 0)
        memcpy(dst, src, count * sizeof(float));
}

static void from_float_f32(void *dst, const float *src, size_t count) { to_float_f32(dst, src, count); }

static void to_float_f64(float *dst, const void *src, size_t count)
{
    INDEPENDENT for (size_t i = 0; i < count; i++)
        store_f32((char *)dst + 4 * i, (float)load_f64((const char *)src + 8 * i));
}

static void from_float_f64(void *dst, const float *src, size_t count)
{
    INDEPENDENT for (size_t i = 0; i < count; i++)
        store_f64((char *)dst + 8 * i, load_f32((const char *)src + 4 * i));
}

HALF_CASTS(f16)
HALF_CASTS(bf16)

#define CAST_SET(dtype, element, table) \
    (table->to_float[dtype] = to_float_##element, table->from_float[dtype] = from_float_##element);

void half_kernels_init(struct kernel_table *table)
{
    CODEC_DEFINE(BHVD_CODEC_FLOAT16, 0, half_encoded_size, f16, f16)
    CODEC_DEFINE(BHVD_CODEC_BFLOAT16, 0, half_encoded_size, bf16, bf16)
    EACH_FLOAT_TYPE(CAST_SET, table)
}
