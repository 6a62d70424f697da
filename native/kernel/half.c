// Codecs float16 and bfloat16: the definitions.
#include "kernel/half.h"

#include "kernel/definitions.h"
#include "kernel/loops.h"
#include "kernel/variants.h"

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

void half_kernels_init(struct kernel_table *table, unsigned cpu)
{
    CODEC_DEFINITIONS(table, BHVD_CODEC_FLOAT16, 0, half_encoded_size, f16, f16);
    CODEC_DEFINITIONS(table, BHVD_CODEC_BFLOAT16, 0, half_encoded_size, bf16, bf16);
    if (cpu & CPU_AVX2)
        half_kernels_init_avx2(table);
}
