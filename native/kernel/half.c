// Codecs float16 and bfloat16, and casts between float32 and the other floating point types: the definitions. dst and src do
// not overlap, except that the float32 copy may be in place.
#include "kernel/half.h"

#include "kernel/definitions.h"
#include "kernel/loops.h"

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

#define OPTIONS const struct bhvd_codec_options *options __attribute__((unused))

// Element type `element` of `size` bytes, read by `load` and written by `store`, as codec `code`, f16 or bf16.
#define HALF(code, element, size, load, store)                                                                  \
    static void code##_encode_##element##_scalar(void *dst, const void *src, size_t count, OPTIONS)             \
    {                                                                                                           \
        convert(dst, 2, src, size, count, load, store_##code);                                                  \
    }                                                                                                           \
    static void code##_decode_##element##_scalar(void *dst, const void *src, size_t count, OPTIONS)             \
    {                                                                                                           \
        convert(dst, size, src, 2, count, load_##code, store);                                                  \
    }                                                                                                           \
    static void code##_decode_add_##element##_scalar(float *dst, const void *src, size_t count, OPTIONS)        \
    {                                                                                                           \
        convert_add(dst, src, count, load_##code, load, store);                                           \
    }
HALF(f16, f32, 4, load_f32, store_f32)
HALF(f16, f16, 2, load_f16, store_f16)
HALF(f16, bf16, 2, load_bf16, store_bf16)
HALF(f16, f64, 8, load_odd_f64, store_wide_f64)
HALF(bf16, f32, 4, load_f32, store_f32)
HALF(bf16, f16, 2, load_f16, store_f16)
HALF(bf16, bf16, 2, load_bf16, store_bf16)
HALF(bf16, f64, 8, load_odd_f64, store_wide_f64)

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

#define CAST(element, size)                                                                            \
    static void to_float_##element##_scalar(float *dst, const void *src, size_t count)                 \
    {                                                                                                  \
        INDEPENDENT for (size_t i = 0; i < count; i++)                                                 \
            store_f32((char *)dst + 4 * i, (float)load_##element((const char *)src + size * i));       \
    }                                                                                                  \
    static void from_float_##element##_scalar(void *dst, const float *src, size_t count)               \
    {                                                                                                  \
        INDEPENDENT for (size_t i = 0; i < count; i++)                                                 \
            store_##element((char *)dst + size * i, load_f32((const char *)src + 4 * i));              \
    }
CAST(f16, 2)
CAST(bf16, 2)
CAST(f64, 8)

#define CAST_SET(dtype, to, from) (table->to_float[dtype] = (to), table->from_float[dtype] = (from))

void half_kernels_init(struct kernel_table *table)
{
    CODEC_DEFINITIONS(table, BHVD_CODEC_FLOAT16, 0, half_encoded_size, f16, f16);
    CODEC_DEFINITIONS(table, BHVD_CODEC_BFLOAT16, 0, half_encoded_size, bf16, bf16);
    CAST_SET(BHVD_FLOAT32, to_float_f32, from_float_f32);
    CAST_SET(BHVD_FLOAT16, to_float_f16_scalar, from_float_f16_scalar);
    CAST_SET(BHVD_BFLOAT16, to_float_bf16_scalar, from_float_bf16_scalar);
    CAST_SET(BHVD_FLOAT64, to_float_f64_scalar, from_float_f64_scalar);
}
