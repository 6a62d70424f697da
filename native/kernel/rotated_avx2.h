// Of rotated_vectors.c, what AVX2 has instructions of its own for.

typedef __m256 mask;
typedef __m256i whole;

#define WHOLE_ZERO _mm256_setzero_si256()
#define whole_or _mm256_or_si256
#define whole_left _mm256_slli_epi32
#define whole_or_where(n, m, k) _mm256_or_si256(n, _mm256_and_si256(_mm256_castps_si256(m), _mm256_set1_epi32(k)))
#define vec_greater(a, b) _mm256_cmp_ps(a, b, _CMP_GT_OQ)
#define vec_is_negative(x) _mm256_castsi256_ps(_mm256_srai_epi32(_mm256_castps_si256(x), 31))
#define vec_choose(m, a, b) _mm256_blendv_ps(a, b, m)
#define vec_lookup _mm256_permutevar8x32_ps

// x t + s is exact but for the sum: t = 1 or -1.
INLINE vec vec_within(vec x)
{
    x = _mm256_fmadd_ps(x, _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1), _mm256_permute_ps(x, 0xb1));
    x = _mm256_fmadd_ps(x, _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1), _mm256_permute_ps(x, 0x4e));
    return _mm256_fmadd_ps(x, _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1), _mm256_permute2f128_ps(x, x, 1));
}

INLINE void words_store(uint8_t *p, const whole *n)
{
    const __m256i words = _mm256_set1_epi32(0xffff);
    const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(n[0], words), _mm256_and_si256(n[1], words));
    _mm256_storeu_si256((void *)p, _mm256_permute4x64_epi64(packed, 0xd8));
}

INLINE void words_load(const uint8_t *p, whole *n)
{
    n[0] = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p));
    n[1] = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(p + 16)));
}

// x, negative where the highest bit is set.
INLINE vec vec_flipped(vec x, whole n)
{
    return _mm256_xor_ps(x, _mm256_and_ps(_mm256_castsi256_ps(n), vec_set1(-0.0f)));
}

// Of 4 bits the table has the magnitudes alone.
INLINE vec vec_numbered(vec table, whole n, int k, int b)
{
    const vec z = _mm256_permutevar8x32_ps(table, _mm256_srli_epi32(n, k));
    return b == 4 ? vec_flipped(z, whole_left(n, 28 - k)) : z;
}
