// Codec minmax_uint8 for AVX2, 32 elements (one block of codes) at a time; float64 by the compiler's vectors.
//
// encode reads the source twice, each time at the speed of memory: it prefetches further than the hardware does, and lets
// the codes of a chunk that no cache can hold bypass the caches. (Measured and rejected: the second pass from back to
// front, which the prefetchers punish more than the warm end repays.)
#include "kernel/minmax_uint8.h"

#include <float.h>

#include "kernel/avx2.h"
#include "kernel/variants.h"

#define ISA avx2
#define ELEMENT f64
#define REAL double
#define REAL_MAX DBL_MAX
#define SIZE 8
#include "kernel/minmax_uint8_loops.h"

enum {
    BLOCK = MINMAX_UINT8_BLOCK,
    PREFETCH_BYTES = 8192,              // ahead of the block in work; past the end of the source it does no harm
    STREAM_COUNT = 4 << 20              // elements, from which on codes bypass the caches
};

// Asks for the cache lines of the block PREFETCH_BYTES ahead.
INLINE void prefetch_block(const char *block, size_t size)
{
    for (size_t line = 0; line < BLOCK * size; line += 64)
        _mm_prefetch(block + PREFETCH_BYTES + line, _MM_HINT_T0);
}

// Stores two vectors of finite numbers one after the other.
typedef void (*store16_fn)(void *p, __m256 a, __m256 b);
// Finite numbers rounded to the element type, still as float32.
typedef __m256 (*round8_fn)(__m256 x);

INLINE void store16_f32(void *p, __m256 a, __m256 b)
{
    store8_f32(p, a);
    store8_f32((char *)p + 4 * LANES, b);
}

INLINE void store16_f16(void *p, __m256 a, __m256 b)
{
    store8_f16(p, a);
    store8_f16((char *)p + 2 * LANES, b);
}

INLINE void store16_bf16(void *p, __m256 a, __m256 b)
{
    const __m256i low = _mm256_srli_epi32(rounded_bf16(a), 16), high = _mm256_srli_epi32(rounded_bf16(b), 16);
    _mm256_storeu_si256(p, _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
}

INLINE __m256 round8_f32(__m256 x)
{
    return x;
}

INLINE __m256 round8_f16(__m256 x)
{
    return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

INLINE __m256 round8_bf16(__m256 x)
{
    return _mm256_castsi256_ps(_mm256_and_si256(rounded_bf16(x), _mm256_set1_epi32((int)0xffff0000)));
}

// An element type: its vectors, and one element for the header.
struct element {
    size_t size;
    load8_fn load8;
    store16_fn store16;
    round8_fn round8;
    float (*load)(const void *p);
    void (*store)(void *p, float x);
};
static const struct element f32 = {4, load8_f32, store16_f32, round8_f32, load_f32, store_f32};
static const struct element f16 = {2, load8_f16, store16_f16, round8_f16, load_f16, store_f16};
static const struct element bf16 = {2, load8_bf16, store16_bf16, round8_bf16, load_bf16, store_bf16};

// The last count % BLOCK elements, filled up to a block by repeating the first of them.
INLINE void tail_load(char *block, const char *src, size_t count, size_t size)
{
    memcpy(block, src, count * size);
    for (size_t i = count; i < BLOCK; i++)
        memcpy(block + i * size, src, size);
}

struct range {
    __m256 mn[2], mx[2], is_nan;        // is_nan: all bits set in a lane that saw a NaN
};

INLINE void range_add(struct range *range, const char *block, const struct element *element)
{
    const __m256 a = element->load8(block), b = element->load8(block + LANES * element->size);
    const __m256 c = element->load8(block + 2 * LANES * element->size);
    const __m256 d = element->load8(block + 3 * LANES * element->size);
    range->mn[0] = _mm256_min_ps(range->mn[0], _mm256_min_ps(a, b));
    range->mx[0] = _mm256_max_ps(range->mx[0], _mm256_max_ps(a, b));
    range->mn[1] = _mm256_min_ps(range->mn[1], _mm256_min_ps(c, d));
    range->mx[1] = _mm256_max_ps(range->mx[1], _mm256_max_ps(c, d));
    // The minimum of two drops a NaN on one side, so NaNs are looked for apart; one comparison serves two vectors.
    range->is_nan = _mm256_or_ps(range->is_nan, _mm256_or_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q),
                                                             _mm256_cmp_ps(c, d, _CMP_UNORD_Q)));
}

// Sets mn and mx to the chunk's minimum and maximum, or both to NaN when an element is not finite.
INLINE void range_find(const char *src, size_t count, const struct element *element, float *mn, float *mx)
{
    struct range range;
    range.mn[0] = range.mn[1] = _mm256_set1_ps(INFINITY);
    range.mx[0] = range.mx[1] = _mm256_set1_ps(-INFINITY);
    range.is_nan = _mm256_setzero_ps();
    size_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) {
        prefetch_block(src + i * element->size, element->size);
        range_add(&range, src + i * element->size, element);
    }
    if (i < count) {
        char block[BLOCK * sizeof(float)];
        tail_load(block, src + i * element->size, count - i, element->size);
        range_add(&range, block, element);
    }
    float low[LANES], high[LANES];
    store8_f32(low, _mm256_min_ps(range.mn[0], range.mn[1]));
    store8_f32(high, _mm256_max_ps(range.mx[0], range.mx[1]));
    *mn = low[0];
    *mx = high[0];
    for (int lane = 1; lane < LANES; lane++) {
        *mn = low[lane] < *mn ? low[lane] : *mn;
        *mx = high[lane] > *mx ? high[lane] : *mx;
    }
    const int is_finite = _mm256_movemask_ps(range.is_nan) == 0 && *mn >= -FLT_MAX && *mx <= FLT_MAX;
    *mn = is_finite ? *mn + 0 : (float)NAN;     // + 0 turns -0.0 into +0.0
    *mx = is_finite ? *mx + 0 : (float)NAN;
}

// Codes of one block. packs and packus saturate, which is the clamp to 0..255.
INLINE __m256i quantize_block(const char *block, const struct element *element, __m256 s, __m256 lb)
{
    __m256i q[4];
    for (int v = 0; v < 4; v++) {
        const __m256 x = element->load8(block + v * LANES * element->size);
        const __m256 level = _mm256_round_ps(_mm256_mul_ps(x, s), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        q[v] = _mm256_cvtps_epi32(_mm256_sub_ps(level, lb));
    }
    const __m256i packed = _mm256_packus_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

INLINE void encode(void *dst, const void *src, size_t count, const struct element *element)
{
    const char *from = src;
    uint8_t *codes = (uint8_t *)dst + MINMAX_UINT8_HEADER;
    float mn = 0, mx = 0;
    if (count > 0)
        range_find(from, count, element, &mn, &mx);
    minmax_uint8_header_init(dst, mn == mn);
    element->store(dst, mn);
    element->store((char *)dst + element->size, mx);
    if (!(mx > mn)) {
        memset(codes, 0, minmax_uint8_codes_size(count));
        return;
    }

    const struct minmax_uint8_float_grid grid = minmax_uint8_float_grid(mn, mx);
    const __m256 s = _mm256_set1_ps(grid.s), lb = _mm256_set1_ps(grid.lb);
    const int stream = count >= STREAM_COUNT && (uintptr_t)codes % BLOCK == 0;
    size_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) {
        prefetch_block(from + i * element->size, element->size);
        const __m256i q = quantize_block(from + i * element->size, element, s, lb);
        if (stream)
            _mm256_stream_si256((__m256i *)(codes + i), q);
        else
            _mm256_storeu_si256((__m256i *)(codes + i), q);
    }
    if (stream)
        _mm_sfence();                   // before the codes are announced to another thread
    if (i < count) {
        char block[BLOCK * sizeof(float)];
        tail_load(block, from + i * element->size, count - i, element->size);
        _mm256_storeu_si256((__m256i *)block, quantize_block(block, element, s, lb));
        memcpy(codes + i, block, count - i);
        memset(codes + count, 0, BLOCK - (count - i));
    }
}

struct grid8 {
    __m256 lb, t, mn, mx;
};

INLINE struct grid8 grid8_from(float mn, float mx)
{
    const struct minmax_uint8_float_grid grid = minmax_uint8_float_grid(mn, mx);
    return (struct grid8){_mm256_set1_ps(grid.lb), _mm256_set1_ps(grid.t), _mm256_set1_ps(mn), _mm256_set1_ps(mx)};
}

INLINE __m256 dequantize8(const uint8_t *codes, const struct grid8 *grid)
{
    const __m256 q = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes)));
    const __m256 x = _mm256_mul_ps(_mm256_add_ps(q, grid->lb), grid->t);
    return _mm256_min_ps(_mm256_max_ps(x, grid->mn), grid->mx);
}

INLINE void decode(void *dst, const void *src, size_t count, const struct element *element)
{
    const uint8_t *codes = (const uint8_t *)src + MINMAX_UINT8_HEADER;
    char *to = dst;
    const float mn = element->load(src), mx = element->load((const char *)src + element->size);
    if (!(mx > mn)) {
        for (size_t i = 0; i < count; i++)
            element->store(to + i * element->size, mn);
        return;
    }
    const struct grid8 grid = grid8_from(mn, mx);
    size_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES)
        element->store16(to + i * element->size, dequantize8(codes + i, &grid), dequantize8(codes + i + LANES, &grid));
    if (i < count) {                            // the codes are padded, so whole vectors can be read
        char last[2 * LANES * sizeof(float)];
        element->store16(last, dequantize8(codes + i, &grid), dequantize8(codes + i + LANES, &grid));
        memcpy(to + i * element->size, last, (count - i) * element->size);
    }
}

INLINE void decode_add(float *dst, const void *src, size_t count, const struct element *element)
{
    const uint8_t *codes = (const uint8_t *)src + MINMAX_UINT8_HEADER;
    char *to = (char *)dst;
    const float mn = element->load(src), mx = element->load((const char *)src + element->size);
    if (!(mx > mn)) {
        for (size_t i = 0; i < count; i++)
            store_f32(to + 4 * i, load_f32(to + 4 * i) + mn);
        return;
    }
    const struct grid8 grid = grid8_from(mn, mx);
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const __m256 x = element->round8(dequantize8(codes + i, &grid));
        store8_f32(to + 4 * i, _mm256_add_ps(load8_f32(to + 4 * i), x));
    }
    if (i < count) {
        float sum[LANES] = {0};
        memcpy(sum, to + 4 * i, 4 * (count - i));
        store8_f32(sum, _mm256_add_ps(load8_f32(sum), element->round8(dequantize8(codes + i, &grid))));
        memcpy(to + 4 * i, sum, 4 * (count - i));
    }
}

#define CODEC_AVX2(element)                                                                    \
    static void minmax_uint8_encode_##element##_avx2(void *dst, const void *src, size_t count) \
    {                                                                                          \
        encode(dst, src, count, &element);                                                     \
    }                                                                                          \
    static void minmax_uint8_decode_##element##_avx2(void *dst, const void *src, size_t count) \
    {                                                                                          \
        decode(dst, src, count, &element);                                                     \
    }                                                                                          \
    static void minmax_uint8_decode_add_##element##_avx2(float *dst, const void *src, size_t count) \
    {                                                                                          \
        decode_add(dst, src, count, &element);                                                 \
    }
CODEC_AVX2(f32)
CODEC_AVX2(f16)
CODEC_AVX2(bf16)

#define CODEC_FILL(dtype, element)                                          \
    table->minmax_uint8[dtype] = (struct kernel_codec)                      \
    {                                                                       \
        minmax_uint8_encode_##element##_avx2, minmax_uint8_decode_##element##_avx2, minmax_uint8_decode_add_##element##_avx2 \
    }

void minmax_uint8_kernels_init_avx2(struct kernel_table *table)
{
    CODEC_FILL(BHVD_FLOAT32, f32);
    CODEC_FILL(BHVD_FLOAT16, f16);
    CODEC_FILL(BHVD_BFLOAT16, bf16);
    CODEC_FILL(BHVD_FLOAT64, f64);
}
