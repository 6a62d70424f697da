// Elementwise reductions for AVX2: the loops of reduce_loops.h again, and float16 and bfloat16 by vectors of float32.
#include "kernel/reduce_loops.h"

#include "kernel/avx2.h"
#include "kernel/variants.h"

typedef __m256 (*operation_fn)(__m256 x, __m256 y);

INLINE __m256 add8(__m256 x, __m256 y) { return _mm256_add_ps(x, y); }
INLINE __m256 multiply8(__m256 x, __m256 y) { return _mm256_mul_ps(x, y); }

// The instruction gives y when either is NaN, so a NaN in x must be put back.
INLINE __m256 minimum8(__m256 x, __m256 y)
{
    return _mm256_blendv_ps(_mm256_min_ps(x, y), x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

INLINE __m256 maximum8(__m256 x, __m256 y)
{
    return _mm256_blendv_ps(_mm256_max_ps(x, y), x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

INLINE struct pair operate(struct pair x, struct pair y, operation_fn operation)
{
    return (struct pair){canonical_nan8(operation(x.a, y.a)), canonical_nan8(operation(x.b, y.b))};
}

INLINE void reduce_half(void *dst, const void *a, const void *b, size_t count, load_pair_fn load, store_pair_fn store,
                        operation_fn operation)
{
    enum { STEP = 2 * LANES };
    char *to = dst;
    const char *left = a, *right = b;
    size_t i = 0;
    for (; i + STEP <= count; i += STEP)
        store(to + 2 * i, operate(load(left + 2 * i), load(right + 2 * i), operation));
    if (i < count) {
        uint16_t x[STEP] = {0}, y[STEP] = {0};
        memcpy(x, left + 2 * i, 2 * (count - i));
        memcpy(y, right + 2 * i, 2 * (count - i));
        store(x, operate(load(x), load(y), operation));
        memcpy(to + 2 * i, x, 2 * (count - i));
    }
}

#define REDUCE_HALF(name, element, operation)                                                            \
    static void reduce_##name##_##element##_avx2(void *dst, const void *a, const void *b, size_t count)  \
    {                                                                                                    \
        reduce_half(dst, a, b, count, load_pair_##element, store_pair_##element, operation);             \
    }

REDUCE_HALF(sum, f16, add8)
REDUCE_HALF(product, f16, multiply8)
REDUCE_HALF(min, f16, minimum8)
REDUCE_HALF(max, f16, maximum8)
REDUCE_HALF(sum, bf16, add8)
REDUCE_HALF(product, bf16, multiply8)
REDUCE_HALF(min, bf16, minimum8)
REDUCE_HALF(max, bf16, maximum8)

void reduce_kernels_init_avx2(struct kernel_table *table)
{
    reduce_loops_init_avx2(table);
    REDUCE_FILL(BHVD_FLOAT16, sum_f16, product_f16, min_f16, max_f16);
    REDUCE_FILL(BHVD_BFLOAT16, sum_bf16, product_bf16, min_bf16, max_bf16);
}
