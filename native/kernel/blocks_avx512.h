// Of blocks_vectors.c, what AVX-512 has instructions of its own for.

INLINE __m128i float8_code(vec y)
{
    const __m512i bits = _mm512_castps_si512(y), one = _mm512_set1_epi32(1);
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
    enum { DROPPED = 23 - E4M3_MANTISSA };
    const vec least = vec_set1(float_from_bits((uint32_t)(128 - E4M3_BIAS) << 23));
    const vec unit = vec_set1(float_from_bits((uint32_t)(126 + E4M3_BIAS + E4M3_MANTISSA) << 23));
    const __m512i narrow = _mm512_sub_epi32(_mm512_castps_si512(vec_abs(y)), _mm512_set1_epi32((127 - E4M3_BIAS) << 23));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(narrow, DROPPED), one);
    const __m512i up = _mm512_add_epi32(odd, _mm512_set1_epi32((1 << (DROPPED - 1)) - 1));
    const __m512i normal = _mm512_srli_epi32(_mm512_add_epi32(narrow, up), DROPPED);
    const __m512i subnormal = _mm512_cvtps_epi32(vec_mul(vec_abs(y), unit));
    const __mmask16 is_subnormal = _mm512_cmp_ps_mask(vec_abs(y), least, _CMP_LT_OQ);
    return _mm512_cvtepi32_epi8(_mm512_or_si512(sign, _mm512_mask_mov_epi32(normal, is_subnormal, subnormal)));
}

INLINE __m256i float8_codes(const vec *y)
{
    return joined(float8_code(y[0]), float8_code(y[1]));
}

INLINE vec float8_values(__m128i bytes)
{
    const __m256i wide = _mm256_cvtepu8_epi16(bytes);
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
    const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
    return _mm512_cvtph_ps(_mm256_or_si256(
        sign, _mm256_slli_epi16(magnitude, 10 - E4M3_MANTISSA)));
}

INLINE __m128i pair_codes(const vec *q)
{
    const __m512i low = _mm512_cvttps_epi32(q[0]), high = _mm512_slli_epi32(_mm512_cvttps_epi32(q[1]), 4);
    return _mm512_cvtepi32_epi8(_mm512_ternarylogic_epi32(low, _mm512_set1_epi32(15), high, AND_OR));
}
