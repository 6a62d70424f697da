// Of blocks_vectors.c, what AVX2 has instructions of its own for.

INLINE __m256i float8_code(vec y)
{
    const __m256i bits = _mm256_castps_si256(y), one = _mm256_set1_epi32(1);
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
    enum { DROPPED = 23 - E4M3_MANTISSA };
    const vec least = vec_set1(float_from_bits((uint32_t)(128 - E4M3_BIAS) << 23));
    const vec unit = vec_set1(float_from_bits((uint32_t)(126 + E4M3_BIAS + E4M3_MANTISSA) << 23));
    const __m256i narrow = _mm256_sub_epi32(_mm256_castps_si256(vec_abs(y)), _mm256_set1_epi32((127 - E4M3_BIAS) << 23));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(narrow, DROPPED), one);
    const __m256i up = _mm256_add_epi32(odd, _mm256_set1_epi32((1 << (DROPPED - 1)) - 1));
    const __m256i normal = _mm256_srli_epi32(_mm256_add_epi32(narrow, up), DROPPED);
    const __m256i subnormal = _mm256_cvtps_epi32(vec_mul(vec_abs(y), unit));
    const __m256i is_subnormal = _mm256_castps_si256(_mm256_cmp_ps(vec_abs(y), least, _CMP_LT_OQ));
    return _mm256_or_si256(sign, _mm256_blendv_epi8(normal, subnormal, is_subnormal));
}

INLINE __m256i float8_codes(const vec *y)
{
    const __m256i codes[] = {float8_code(y[0]), float8_code(y[1]),
                             float8_code(y[2]), float8_code(y[3])};
    return packed_u8(codes);
}

INLINE vec float8_values(__m128i bytes)
{
    const __m128i wide = _mm_cvtepu8_epi16(bytes);
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8);
    const __m128i magnitude = _mm_and_si128(wide, _mm_set1_epi16(0x7f));
    return _mm256_cvtph_ps(_mm_or_si128(sign, _mm_slli_epi16(magnitude, 10 - E4M3_MANTISSA)));
}

// Those of LANES pairs, whole numbers each.
INLINE __m256i pairs(vec low, vec high)
{
    const __m256i nibble = _mm256_set1_epi32(15);
    return _mm256_or_si256(_mm256_and_si256(_mm256_cvttps_epi32(low), nibble),
                           _mm256_slli_epi32(_mm256_and_si256(_mm256_cvttps_epi32(high), nibble), 4));
}

INLINE __m128i pair_codes(const vec *q)
{
    const __m256i codes[] = {pairs(q[0], q[2]), pairs(q[1], q[3]), _mm256_setzero_si256(), _mm256_setzero_si256()};
    return _mm256_castsi256_si128(packed_u8(codes));
}
