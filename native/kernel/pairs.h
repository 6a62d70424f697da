// Sixteen 16-bit elements as two vectors, for elementwise work with AVX2. The order of lanes depends on the type. (bfloat16: even
// and odd elements, which needs no shuffle.) Stores accept numbers and canonical NaNs.
#pragma once

#include "kernel/vectors.h"

struct pair {
    vec a, b;
};

typedef struct pair (*load_pair_fn)(const void *p);
typedef void (*store_pair_fn)(void *p, struct pair x);

INLINE struct pair load_pair_f16(const void *p)
{
    return (struct pair){vec_load_f16(p), vec_load_f16((const char *)p + sizeof(halves))};
}

INLINE void store_pair_f16(void *p, struct pair x) { vec_store_two_f16(p, x.a, x.b); }

INLINE struct pair load_pair_bf16(const void *p)
{
    const whole bits = (whole)_mm256_loadu_si256(p);
    return (struct pair){(vec)(bits << 16), (vec)(bits & 0xffff0000)};
}

INLINE void store_pair_bf16(void *p, struct pair x)
{
    const __m256i even = (__m256i)(rounded_bf16(x.a) >> 16);
    _mm256_storeu_si256(p, _mm256_blend_epi16(even, (__m256i)rounded_bf16(x.b), 0xaa));
}
