// Codecs float32, float16 and bfloat16, and casts between float32 and the other floating point types. dst and src do not overlap,
// except that the float32 copy may be in place.
//
// float16, bfloat16: each element is rounded to a 16-bit float, to nearest even. Numbers that are too large become infinities;
// infinities and NaNs are kept. A float64 is rounded once, not through float32. Code layout: the elements, no header; an empty
// segment has no bytes.
// float32: the values themselves, unchanged. For data that must be sent as codes but without loss, such as the initial replicas.
// Takes float32 only.
#include "kernel/loops.h"

#ifdef VECTORS
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
    store_halves(p, halves_of((whole)vec_choose(vec_unordered(x, x), (vec)rounded_bf16(x), (vec)quiet) >> 16));
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
        char y[LANES * sizeof(float)] __attribute__((aligned(sizeof(vec))));
        for (; i + LANES <= count; i += LANES) {
            _mm_prefetch(from + i * from_size + AHEAD_BYTES, _MM_HINT_T0);
            store(y, load(from + i * from_size));
            if (to_size == sizeof(float))
                vec_stream(to + i * to_size, vec_load(y));
            else
                stream_halves(to + i * to_size, load_halves(y));
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

#else
typedef float (*load_fn)(const void *p);
typedef void (*store_fn)(void *p, float x);

INLINE void convert(void *dst, size_t to_size, const void *src, size_t from_size, size_t count, load_fn load, store_fn store)
{
    INDEPENDENT for (size_t i = 0; i < count; i++)
        store((char *)dst + to_size * i, load((const char *)src + from_size * i));
}

INLINE void convert_add(float *dst, const void *src, size_t count, load_fn load, float (*nearest)(float x))
{
    char *to = (char *)dst;
    INDEPENDENT for (size_t i = 0; i < count; i++)
        store_f32(to + 4 * i, load_f32(to + 4 * i) + nearest(load((const char *)src + 2 * i)));
}

INLINE float nearest_f32(float x) { return x; }
INLINE float nearest_f64(float x) { return x; }
INLINE float nearest_f16(float x) { return float16_to_float(float16_from_float(x)); }
INLINE float nearest_bf16(float x) { return bfloat16_to_float(bfloat16_from_float(x)); }

static float load_odd_f64(const void *p) { return float_rounded_to_odd(load_f64(p)); }
static void store_wide_f64(void *p, float x) { store_f64(p, x); }
#endif

// An element type as codec `code`, f16 or bf16.
#define HALF(dtype, element, code, load, store)                                                                         \
    ENCODE(code, element) { convert(dst, 2, src, sizeof(any_##element), count, load##element, store##code); }           \
    DECODE(code, element) { convert(dst, sizeof(any_##element), src, 2, count, load##code, store##element); }           \
    DECODE_ADD(code, element) { convert_add(dst, src, count, load##code, nearest_##element); }
#ifdef VECTORS
EACH_VECTOR_TYPE(HALF, f16, vec_load_, vec_store_)
EACH_VECTOR_TYPE(HALF, bf16, vec_load_, vec_store_)
#else
EACH_VECTOR_TYPE(HALF, f16, load_, store_)
EACH_VECTOR_TYPE(HALF, bf16, load_, store_)
#define HALF64(code)                                                                                    \
    ENCODE(code, f64) { convert(dst, 2, src, 8, count, load_odd_f64, store_##code); }                   \
    DECODE(code, f64) { convert(dst, 8, src, 2, count, load_##code, store_wide_f64); }                  \
    DECODE_ADD(code, f64) { convert_add(dst, src, count, load_##code, nearest_f64); }
HALF64(f16)
HALF64(bf16)
#endif

static size_t half_encoded_size(bhvd_dtype dtype, size_t count, OPTIONS)
{
    (void)dtype;
    return 2 * count;
}

static size_t float32_encoded_size(bhvd_dtype dtype, size_t count, OPTIONS)
{
    (void)dtype;
    return sizeof(float) * count;
}

static void float32_copy(void *dst, const void *src, size_t count, OPTIONS)
{
    if (count)
        memcpy(dst, src, sizeof(float) * count);
}

static void float32_decode_add(float *dst, const void *src, size_t count, OPTIONS)
{
    any_f32 *sum = dst;
    const any_f32 *values = src;
    INDEPENDENT for (size_t i = 0; i < count; i++)
        sum[i] += values[i];
}

// A cast to float32 is the decoding of float32, and one from it is the encoding.
#define HALF_CASTS(code)                                                                                                        \
    static void to_float_##code(float *dst, const void *src, size_t count) { NAME(code##_decode_f32)(dst, src, count, NULL); }  \
    static void from_float_##code(void *dst, const float *src, size_t count) { NAME(code##_encode_f32)(dst, src, count, NULL); }
HALF_CASTS(f16)
HALF_CASTS(bf16)

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

#define CAST_SET(dtype, element, table) \
    (table->to_float[dtype] = to_float_##element, table->from_float[dtype] = from_float_##element);

void NAME(half_kernels_init)(struct kernel_table *table)
{
    EACH_TYPE(CODEC_SET, BHVD_CODEC_FLOAT16, 0, half_encoded_size, f16, f16)
    EACH_TYPE(CODEC_SET, BHVD_CODEC_BFLOAT16, 0, half_encoded_size, bf16, bf16)
    table->codecs[BHVD_CODEC_FLOAT32][BHVD_FLOAT32] = (struct kernel_codec){
        .encoded_size = float32_encoded_size,
        .encode = float32_copy,
        .decode = float32_copy,
        .decode_add = float32_decode_add,
    };
    EACH_FLOAT_TYPE(CAST_SET, table)
}
