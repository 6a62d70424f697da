// Codecs float16 and bfloat16, and casts between them and float32, for AVX2 with F16C. (float64 by its definition.)
#include "kernel/avx2.h"
#include "kernel/half.h"
#include "kernel/variants.h"

enum {
    PREFETCH_BYTES = 4096,              // ahead of the vector in work
    STREAM_COUNT = 4 << 20              // elements, from which on results bypass the caches
};

INLINE void convert_tail(char *to, size_t to_size, const char *from, size_t from_size, size_t count, load8_fn load,
                         store8_fn store)
{
    char x[LANES * sizeof(float)] = {0}, y[LANES * sizeof(float)];
    memcpy(x, from, count * from_size);
    store(y, load(x));
    memcpy(to, y, count * to_size);
}

INLINE void convert(void *dst, size_t to_size, const void *src, size_t from_size, size_t count, load8_fn load,
                    store8_fn store)
{
    char *to = dst;
    const char *from = src;
    size_t i = 0;
    if (count >= STREAM_COUNT && (uintptr_t)dst % (LANES * to_size) == 0) {
        char y[LANES * sizeof(float)] __attribute__((aligned(32)));
        for (; i + LANES <= count; i += LANES) {
            _mm_prefetch(from + i * from_size + PREFETCH_BYTES, _MM_HINT_T0);
            store(y, load(from + i * from_size));
            if (to_size == sizeof(float))
                _mm256_stream_ps((float *)(to + i * to_size), _mm256_load_ps((float *)y));
            else
                _mm_stream_si128((__m128i *)(to + i * to_size), _mm_load_si128((__m128i *)y));
        }
        _mm_sfence();                   // before the result is announced to another thread
    }
    for (; i + LANES <= count; i += LANES)
        store(to + i * to_size, load(from + i * from_size));
    if (i < count)
        convert_tail(to + i * to_size, to_size, from + i * from_size, from_size, count - i, load, store);
}

INLINE __m256 round_f32(__m256 x) { return x; }
INLINE __m256 round_f16(__m256 x) { return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }

INLINE __m256 round_bf16(__m256 x)
{
    uint16_t y[LANES];
    store8_bf16(y, x);
    return load8_bf16(y);
}

INLINE void convert_add(float *dst, const void *src, size_t count, load8_fn load, __m256 (*round)(__m256 x))
{
    char *to = (char *)dst;
    const char *from = src;
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        store8_f32(to + 4 * i, _mm256_add_ps(load8_f32(to + 4 * i), round(load(from + 2 * i))));
    if (i < count) {
        uint16_t x[LANES] = {0};
        float sum[LANES] = {0};
        memcpy(x, from + 2 * i, 2 * (count - i));
        memcpy(sum, to + 4 * i, 4 * (count - i));
        store8_f32(sum, _mm256_add_ps(load8_f32(sum), round(load(x))));
        memcpy(to + 4 * i, sum, 4 * (count - i));
    }
}

#define OPTIONS const struct bhvd_codec_options *options __attribute__((unused))

#define HALF(code, element, size)                                                                           \
    static void code##_encode_##element##_avx2(void *dst, const void *src, size_t count, OPTIONS)           \
    {                                                                                                       \
        convert(dst, 2, src, size, count, load8_##element, store8_##code);                                  \
    }                                                                                                       \
    static void code##_decode_##element##_avx2(void *dst, const void *src, size_t count, OPTIONS)           \
    {                                                                                                       \
        convert(dst, size, src, 2, count, load8_##code, store8_##element);                                  \
    }                                                                                                       \
    static void code##_decode_add_##element##_avx2(float *dst, const void *src, size_t count, OPTIONS)      \
    {                                                                                                       \
        convert_add(dst, src, count, load8_##code, round_##element);                                        \
    }
HALF(f16, f32, 4)
HALF(f16, f16, 2)
HALF(f16, bf16, 2)
HALF(bf16, f32, 4)
HALF(bf16, f16, 2)
HALF(bf16, bf16, 2)

// A cast to float32 is the decoding of float32, one from it the encoding.
#define CAST(code)                                                                                          \
    static void to_float_##code##_avx2(float *dst, const void *src, size_t count)                           \
    {                                                                                                       \
        convert(dst, 4, src, 2, count, load8_##code, store8_f32);                                           \
    }                                                                                                       \
    static void from_float_##code##_avx2(void *dst, const float *src, size_t count)                         \
    {                                                                                                       \
        convert(dst, 2, src, 4, count, load8_f32, store8_##code);                                           \
    }
CAST(f16)
CAST(bf16)

#define HALF_FILL(codec, code, dtype, element)                                                              \
    kernel_codec_set(&table->codecs[codec][dtype], code##_encode_##element##_avx2,                          \
                     code##_decode_##element##_avx2, code##_decode_add_##element##_avx2)

void half_kernels_init_avx2(struct kernel_table *table)
{
    HALF_FILL(BHVD_CODEC_FLOAT16, f16, BHVD_FLOAT32, f32);
    HALF_FILL(BHVD_CODEC_FLOAT16, f16, BHVD_FLOAT16, f16);
    HALF_FILL(BHVD_CODEC_FLOAT16, f16, BHVD_BFLOAT16, bf16);
    HALF_FILL(BHVD_CODEC_BFLOAT16, bf16, BHVD_FLOAT32, f32);
    HALF_FILL(BHVD_CODEC_BFLOAT16, bf16, BHVD_FLOAT16, f16);
    HALF_FILL(BHVD_CODEC_BFLOAT16, bf16, BHVD_BFLOAT16, bf16);
    table->to_float[BHVD_FLOAT16] = to_float_f16_avx2;
    table->to_float[BHVD_BFLOAT16] = to_float_bf16_avx2;
    table->from_float[BHVD_FLOAT16] = from_float_f16_avx2;
    table->from_float[BHVD_BFLOAT16] = from_float_bf16_avx2;
}
