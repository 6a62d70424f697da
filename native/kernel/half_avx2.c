// Codecs float16 and bfloat16, and casts between them and float32, for AVX2 with F16C. (float64 uses its scalar definition.)
#include "kernel/functions.h"
#include "kernel/of_element.h"
#include "kernel/variants.h"
#include "kernel/vectors.h"

enum { AHEAD_BYTES = 4096 };            // prefetch distance

#define vec_load_f32 vec_load
#define vec_store_f32 vec_store

typedef vec (*load_fn)(const void *p);
typedef void (*store_fn)(void *p, vec x);

// A NaN keeps its sign and leading payload, and becomes quiet.
INLINE void vec_store_bf16(void *p, vec x)
{
    const whole quiet = (whole)x | 0x00400000;
    const __m256i narrow = (__m256i)((whole)vec_choose(vec_unordered(x, x), (vec)rounded_bf16(x), (vec)quiet) >> 16);
    // packus works within each half of the register; lanes 0 and 2 then hold the eight results.
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(narrow, narrow), 0x08);
    _mm_storeu_si128(p, _mm256_castsi256_si128(packed));
}

INLINE void convert_tail(char *to, size_t to_size, const char *from, size_t from_size, size_t count, load_fn load,
                         store_fn store)
{
    char x[LANES * sizeof(float)] = {0}, y[LANES * sizeof(float)];
    memcpy(x, from, count * from_size);
    store(y, load(x));
    memcpy(to, y, count * to_size);
}

INLINE void convert(void *dst, size_t to_size, const void *src, size_t from_size, size_t count, load_fn load,
                    store_fn store)
{
    char *to = dst;
    const char *from = src;
    size_t i = 0;
    if (count >= STREAM_COUNT && (uintptr_t)dst % (LANES * to_size) == 0) {
        char y[LANES * sizeof(float)] __attribute__((aligned(32)));
        for (; i + LANES <= count; i += LANES) {
            _mm_prefetch(from + i * from_size + AHEAD_BYTES, _MM_HINT_T0);
            store(y, load(from + i * from_size));
            if (to_size == sizeof(float))
                vec_stream(to + i * to_size, vec_load(y));
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

INLINE vec nearest_f32(vec x) { return x; }
INLINE vec nearest_f16(vec x) { return vec_round_f16(x); }

// Also handles NaNs, unlike vec_round_bf16.
INLINE vec nearest_bf16(vec x)
{
    uint16_t y[LANES];
    vec_store_bf16(y, x);
    return vec_load_bf16(y);
}

INLINE void convert_add(float *dst, const void *src, size_t count, load_fn load, vec (*nearest)(vec x))
{
    char *to = (char *)dst;
    const char *from = src;
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        vec_store(to + 4 * i, vec_load(to + 4 * i) + nearest(load(from + 2 * i)));
    if (i < count) {
        uint16_t x[LANES] = {0};
        float sum[LANES] = {0};
        memcpy(x, from + 2 * i, 2 * (count - i));
        memcpy(sum, to + 4 * i, 4 * (count - i));
        vec_store(sum, vec_load(sum) + nearest(load(x)));
        memcpy(to + 4 * i, sum, 4 * (count - i));
    }
}

#define HALF(dtype, element, code)                                                                                  \
    ENCODE(code, element) { convert(dst, 2, src, SIZE_##element, count, vec_load_##element, vec_store_##code); }    \
    DECODE(code, element) { convert(dst, SIZE_##element, src, 2, count, vec_load_##code, vec_store_##element); }    \
    DECODE_ADD(code, element) { convert_add(dst, src, count, vec_load_##code, nearest_##element); }
EACH_VECTOR_TYPE(HALF, f16)
EACH_VECTOR_TYPE(HALF, bf16)

HALF_CASTS(f16)
HALF_CASTS(bf16)

void half_kernels_init_avx2(struct kernel_table *table)
{
    EACH_VECTOR_TYPE(CODEC_SET, BHVD_CODEC_FLOAT16, f16, f16)
    EACH_VECTOR_TYPE(CODEC_SET, BHVD_CODEC_BFLOAT16, bf16, bf16)
    table->to_float[BHVD_FLOAT16] = to_float_f16;
    table->to_float[BHVD_BFLOAT16] = to_float_bf16;
    table->from_float[BHVD_FLOAT16] = from_float_f16;
    table->from_float[BHVD_BFLOAT16] = from_float_bf16;
}
