// Of rotated_vectors.c, what AVX-512 has instructions of its own for.

typedef __mmask16 mask;
typedef __m512i whole;

#define WHOLE_ZERO _mm512_setzero_si512()
#define whole_or _mm512_or_si512
#define whole_left(n, k) _mm512_slli_epi32(n, (unsigned)(k))
#define whole_or_where(n, m, k) _mm512_mask_or_epi32(n, m, n, _mm512_set1_epi32(k))
#define vec_greater(a, b) _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ)
#define vec_is_negative(x) _mm512_movepi32_mask(_mm512_castps_si512(x))
#define vec_choose _mm512_mask_blend_ps
#define vec_lookup(table, n) _mm512_permutexvar_ps(n, table)

// x t + s is exact but for the sum: t = 1 or -1.
INLINE vec with_partner(vec x, vec partner, __mmask16 upper)
{
    return _mm512_fmadd_ps(x, _mm512_mask_blend_ps(upper, vec_set1(1), vec_set1(-1)), partner);
}

INLINE vec vec_within(vec x)
{
    x = with_partner(x, _mm512_permute_ps(x, 0xb1), 0xaaaa);
    x = with_partner(x, _mm512_permute_ps(x, 0x4e), 0xcccc);
    x = with_partner(x, _mm512_shuffle_f32x4(x, x, 0xb1), 0xf0f0);
    return with_partner(x, _mm512_shuffle_f32x4(x, x, 0x4e), 0xff00);
}

INLINE void words_store(uint8_t *p, const whole *n) { _mm256_storeu_si256((void *)p, _mm512_cvtepi32_epi16(n[0])); }

INLINE void words_load(const uint8_t *p, whole *n)
{
    n[0] = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p));
}

// x, negative where the highest bit is set.
INLINE vec vec_flipped(vec x, whole n)
{
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(n, _mm512_set1_epi32(INT32_MIN), _mm512_castps_si512(x), 0x6a));
}

INLINE vec vec_numbered(vec table, whole n, int k, int b)
{
    (void)b;
    return _mm512_permutexvar_ps(_mm512_srli_epi32(n, (unsigned)k), table);
}
