// Casts between float32 and the 16-bit floating point types for AVX2 with F16C. (float64 is memory bound as it is.)
#include "kernel/avx2.h"
#include "kernel/variants.h"

INLINE void to_float(float *dst, const void *src, size_t count, load8_fn load)
{
    char *to = (char *)dst;
    const char *from = src;
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        store8_f32(to + 4 * i, load(from + 2 * i));
    if (i < count) {
        uint16_t x[LANES] = {0};
        float y[LANES];
        memcpy(x, from + 2 * i, 2 * (count - i));
        store8_f32(y, load(x));
        memcpy(to + 4 * i, y, 4 * (count - i));
    }
}

INLINE void from_float(void *dst, const float *src, size_t count, store8_fn store)
{
    char *to = dst;
    const char *from = (const char *)src;
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        store(to + 2 * i, load8_f32(from + 4 * i));
    if (i < count) {
        float x[LANES] = {0};
        uint16_t y[LANES];
        memcpy(x, from + 4 * i, 4 * (count - i));
        store(y, load8_f32(x));
        memcpy(to + 2 * i, y, 2 * (count - i));
    }
}

static void cast_f16_to_float_avx2(float *dst, const void *src, size_t count)
{
    to_float(dst, src, count, load8_f16);
}

static void cast_bf16_to_float_avx2(float *dst, const void *src, size_t count)
{
    to_float(dst, src, count, load8_bf16);
}

static void cast_f16_from_float_avx2(void *dst, const float *src, size_t count)
{
    from_float(dst, src, count, store8_f16);
}

static void cast_bf16_from_float_avx2(void *dst, const float *src, size_t count)
{
    from_float(dst, src, count, store8_bf16);
}

void cast_kernels_init_avx2(struct kernel_table *table)
{
    table->to_float[BHVD_FLOAT16] = cast_f16_to_float_avx2;
    table->to_float[BHVD_BFLOAT16] = cast_bf16_to_float_avx2;
    table->from_float[BHVD_FLOAT16] = cast_f16_from_float_avx2;
    table->from_float[BHVD_BFLOAT16] = cast_bf16_from_float_avx2;
}
