// Eight elements of a floating point type as one vector of float32, bit-equal to element.h. Only for _avx2.c files.
#pragma once

#include <immintrin.h>

#include "kernel/element.h"
#include "kernel/loops.h"

enum { LANES = 8 };

typedef __m256 (*load8_fn)(const void *p);
typedef void (*store8_fn)(void *p, __m256 x);

INLINE __m256 load8_f32(const void *p) { return _mm256_loadu_ps(p); }
INLINE void store8_f32(void *p, __m256 x) { _mm256_storeu_ps(p, x); }
INLINE __m256 load8_f16(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }
INLINE void store8_f16(void *p, __m256 x) { _mm_storeu_si128(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }

INLINE __m256 load8_bf16(const void *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}

// The upper half of each lane becomes x rounded to bfloat16. x: a number or the canonical NaN (others might overflow).
INLINE __m256i rounded_bf16(__m256 x)
{
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(bits, _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff)));
}

INLINE void store8_bf16(void *p, __m256 x)
{
    const __m256i quiet = _mm256_or_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x00400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i narrow = _mm256_srli_epi32(_mm256_blendv_epi8(rounded_bf16(x), quiet, is_nan), 16);
    // packus works within each half of the register; lanes 0 and 2 then hold the eight results.
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(narrow, narrow), 0x08);
    _mm_storeu_si128(p, _mm256_castsi256_si128(packed));
}

INLINE __m256 canonical_nan8(__m256 x)
{
    return _mm256_blendv_ps(x, _mm256_set1_ps((float)NAN), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

// Sixteen 16-bit elements as two vectors, for elementwise work: which element stands in which lane is the type's own
// business. (bfloat16: the even ones and the odd ones, which takes no shuffle.) Stores take numbers and canonical NaNs.
struct pair {
    __m256 a, b;
};

typedef struct pair (*load_pair_fn)(const void *p);
typedef void (*store_pair_fn)(void *p, struct pair x);

INLINE struct pair load_pair_f16(const void *p)
{
    return (struct pair){load8_f16(p), load8_f16((const char *)p + 2 * LANES)};
}

INLINE void store_pair_f16(void *p, struct pair x)
{
    store8_f16(p, x.a);
    store8_f16((char *)p + 2 * LANES, x.b);
}

INLINE struct pair load_pair_bf16(const void *p)
{
    const __m256i bits = _mm256_loadu_si256(p);
    const __m256i odd = _mm256_and_si256(bits, _mm256_set1_epi32((int)0xffff0000));
    return (struct pair){_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)), _mm256_castsi256_ps(odd)};
}

INLINE void store_pair_bf16(void *p, struct pair x)
{
    const __m256i even = _mm256_srli_epi32(rounded_bf16(x.a), 16);
    _mm256_storeu_si256(p, _mm256_blend_epi16(even, rounded_bf16(x.b), 0xaa));
}
