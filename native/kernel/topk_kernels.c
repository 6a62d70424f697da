// Codecs topk and topk_2bit.
//
// topk: the k elements of largest magnitude, exactly; the others decode to 0.
//
//     k = max(1, ceil(p d)),  0 for d = 0;  p is options.parameter, d the segment's elements, at most 2^32 - 1
//
// Among equal magnitudes the lower indices are kept. A NaN counts as larger than all numbers (all NaNs as equal), so it is sent.
// Use it with error feedback. Decoding ignores indices beyond the segment.
//
// Source: sparsified SGD with memory, Stich et al., arXiv:1809.07599.
//
// Code layout (codec.h): a header, then k indices, uint32, rising, then the k elements in the same order.
#include "kernel/codec.h"
#include "kernel/loops.h"
#include "kernel/topk_select.h"

enum { TOPK_VERSION = 1, TOPK_2BIT_VERSION = 1 };

#define TOPK_SHARE 0.01                 // p by default

// k; 0: the segment is empty, or the parameter or the count is out of range.
static inline size_t topk_count(double parameter, size_t count)
{
    const double share = parameter == 0 ? TOPK_SHARE : parameter;
    if (!(share > 0 && share <= 1) || count == 0 || count > UINT32_MAX)
        return 0;
    const size_t kept = (size_t)ceil(share * (double)count);
    return kept < count ? kept : count;
}

// ------------------------------------------------------------------------------------------------------------- topk

// Where indices and values are written.
struct topk_pairs {
    const struct topk_element *element;
    char *indices, *values;
    int is_finite;
};

INLINE void topk_store(void *state, size_t j, uint32_t index, const char *x, uint64_t magnitude)
{
    struct topk_pairs *pairs = state;
    pairs->is_finite &= magnitude < pairs->element->infinity;
    memcpy(pairs->indices + j * sizeof index, &index, sizeof index);
    memcpy(pairs->values + j * pairs->element->size, x, pairs->element->size);
}

INLINE void topk_encode(void *dst, const void *src, size_t count, double parameter, const struct topk_element *element)
{
    const size_t k = topk_count(parameter, count);
    char *indices = (char *)dst + CODEC_HEADER;
    struct topk_pairs pairs = {element, indices, indices + k * sizeof(uint32_t), 1};
    if (k > 0) {
        struct topk_selection of = topk_select(src, count, k, element);
        topk_visit(&of, topk_store, &pairs);
        topk_selection_fini(&of);
    }
    codec_header_init(dst, TOPK_VERSION, pairs.is_finite);
}

// Reads the kept elements in order.
struct topk_reader {
    const char *indices, *values;
    size_t k, j;                        // total number, the next one
};

INLINE struct topk_reader topk_reader(const void *src, size_t count, double parameter)
{
    const size_t k = topk_count(parameter, count);
    const char *indices = (const char *)src + CODEC_HEADER;
    return (struct topk_reader){indices, indices + k * sizeof(uint32_t), k, 0};
}

// The next element's index and bits; false: there are no more.
INLINE int topk_next(struct topk_reader *reader, const struct topk_element *element, size_t *index, uint64_t *bits)
{
    uint32_t stored;
    if (reader->j == reader->k)
        return 0;
    memcpy(&stored, reader->indices + reader->j * sizeof stored, sizeof stored);
    *index = stored;
    memcpy(bits, reader->values + reader->j * element->size, element->size);
    reader->j++;
    return 1;
}

// ---------------------------------------------------------------------------------------------------------- topk_2bit

// Codec topk_2bit: the same elements as topk, each as a sign and one of two magnitudes; the others decode to 0.
//
//     t  = mean |x|           over the k kept elements
//     hi = mean |x| of those with |x| >= t,    lo = mean |x| of the others,    0 of none
//     D(Q(x)) = sign(x) hi or sign(x) lo
//
// k and the choice of elements: as topk. Means are sums in float64 in the order of the indices, of |x| / 2^32, lest they overflow;
// they are at most the largest |x|, and are rounded to float32 (not for float64), then to the element's type. With a NaN or an
// infinity among the kept elements, lo and hi are NaN. Use it with error feedback.
//
// Source: SparseLoCo, Sarfi et al., arXiv:2508.15706, has 2 bits for each value; indices by Elias and Fano, as Vigna,
// Quasi-succinct indices, WSDM 2013.  Differs: two magnitudes for a segment.
//
// Code layout (codec.h): in the header at 0 and 8 lo and hi, as the element type's bits, uint64. Then, each beginning at a byte:
//     k + ((d - 1) >> l) bits     bit (i >> l) + j is set for the index i of kept element j; l is the largest with
//                                 k 2^l <= d, 0 if there is none
//     k l bits                    the l low bits of each index
//     2 k bits                    for each element: 1 for hi, 2 for a negative sign
// Bits are counted from the lowest of a byte on. A kept element takes l + 4 to l + 5 bits: 10 at p = 0.02, where topk takes 64.

// Offsets within a code.
struct topk_2bit_layout {
    size_t k, high_bits;
    unsigned low_bits;                  // l
    size_t low_at, codes_at, size;      // bytes
};

static inline struct topk_2bit_layout topk_2bit_layout(double parameter, size_t count)
{
    struct topk_2bit_layout of = {topk_count(parameter, count), 0, 0, 0, 0, CODEC_HEADER};
    if (of.k == 0)
        return of;
    while ((uint64_t)of.k << (of.low_bits + 1) <= count)
        of.low_bits++;
    of.high_bits = of.k + ((count - 1) >> of.low_bits);
    of.low_at = CODEC_HEADER + (of.high_bits + 7) / 8;
    of.codes_at = of.low_at + (of.k * of.low_bits + 7) / 8;
    of.size = of.codes_at + (of.k + 3) / 4;
    return of;
}

// Writes values of a few bits one after the other, 32 bits at a time.
struct topk_2bit_writer {
    char *to;
    uint64_t bits;                      // not yet written
    unsigned count;                     // number of these bits, below 32 between two calls
};

// width <= 32; value < 2^width.
INLINE void topk_2bit_put(struct topk_2bit_writer *writer, uint32_t value, unsigned width)
{
    writer->bits |= (uint64_t)value << writer->count;
    writer->count += width;
    if (writer->count < 32)
        return;
    for (int byte = 0; byte < 4; byte++)
        writer->to[byte] = (char)(writer->bits >> 8 * byte);
    writer->to += 4;
    writer->bits >>= 32;
    writer->count -= 32;
}

INLINE void topk_2bit_end(const struct topk_2bit_writer *writer)
{
    for (unsigned byte = 0; 8 * byte < writer->count; byte++)
        writer->to[byte] = (char)(writer->bits >> 8 * byte);
}

// width <= 32.
INLINE uint32_t topk_2bit_get(const char *base, size_t at, unsigned width)
{
    const unsigned shift = at % 8;
    uint64_t bits = 0;
    for (unsigned read = 0; read < shift + width; read += 8)
        bits |= (uint64_t)(uint8_t)base[at / 8 + read / 8] << read;
    return (uint32_t)(bits >> shift & (((uint64_t)1 << width) - 1));
}

// Sums over the kept elements.
struct topk_2bit_sums {
    double all, low, high;
    size_t lows;
    uint64_t largest;
};

struct topk_2bit_encoding {
    const struct topk_element *element;
    struct topk_2bit_layout of;
    struct topk_2bit_sums sums;
    double mean;                        // t / 2^32
    char *high;
    struct topk_2bit_writer low, codes;
};

INLINE void topk_2bit_sum(void *state, size_t j, uint32_t index, const char *x, uint64_t magnitude)
{
    struct topk_2bit_encoding *encoding = state;
    (void)j, (void)index, (void)x;
    encoding->sums.all += encoding->element->number(magnitude) * 0x1p-32;
    if (magnitude > encoding->sums.largest)
        encoding->sums.largest = magnitude;
}

INLINE void topk_2bit_split(void *state, size_t j, uint32_t index, const char *x, uint64_t magnitude)
{
    struct topk_2bit_encoding *encoding = state;
    const double number = encoding->element->number(magnitude) * 0x1p-32;
    const uint32_t is_high = number >= encoding->mean, is_negative = (uint8_t)x[encoding->element->size - 1] >> 7;
    encoding->sums.high += is_high ? number : 0;    // without a branch, which would be unpredictable
    encoding->sums.low += is_high ? 0 : number;
    encoding->sums.lows += !is_high;
    const size_t at = (index >> encoding->of.low_bits) + j;
    encoding->high[at / 8] = (char)((uint8_t)encoding->high[at / 8] | 1u << at % 8);
    topk_2bit_put(&encoding->low, index & (uint32_t)(((uint64_t)1 << encoding->of.low_bits) - 1), encoding->of.low_bits);
    topk_2bit_put(&encoding->codes, is_negative << 1 | is_high, 2);
}

// The bits of the mean of some magnitudes.
INLINE uint64_t topk_2bit_level(const struct topk_element *element, double sum, size_t count, uint64_t largest)
{
    if (count == 0)
        return 0;
    const double mean = sum / (double)count * 0x1p32, most = element->number(largest);
    return element->rounded(mean < most ? mean : most);
}

INLINE void topk_2bit_encode(void *dst, const void *src, size_t count, double parameter,
                             const struct topk_element *element)
{
    struct topk_2bit_encoding encoding = {.element = element, .of = topk_2bit_layout(parameter, count)};
    const size_t k = encoding.of.k;
    encoding.high = (char *)dst + CODEC_HEADER;
    encoding.low.to = (char *)dst + encoding.of.low_at;
    encoding.codes.to = (char *)dst + encoding.of.codes_at;
    memset(dst, 0, encoding.of.size);
    uint64_t low = 0, high = 0;
    int is_finite = 1;
    if (k > 0) {
        struct topk_selection of = topk_select(src, count, k, element);
        topk_visit(&of, topk_2bit_sum, &encoding);
        is_finite = encoding.sums.largest < element->infinity;
        encoding.mean = encoding.sums.all / (double)k;
        topk_visit(&of, topk_2bit_split, &encoding);
        topk_2bit_end(&encoding.low);
        topk_2bit_end(&encoding.codes);
        topk_selection_fini(&of);
        low = topk_2bit_level(element, encoding.sums.low, encoding.sums.lows, encoding.sums.largest);
        high = topk_2bit_level(element, encoding.sums.high, k - encoding.sums.lows, encoding.sums.largest);
        if (!is_finite)
            low = high = element->nan;
    }
    codec_header_init(dst, TOPK_2BIT_VERSION, is_finite);
    memcpy(dst, &low, sizeof low);
    memcpy((char *)dst + sizeof low, &high, sizeof high);
}

// Like struct topk_reader.
struct topk_2bit_reader {
    const char *code;
    struct topk_2bit_layout of;
    uint64_t levels[2];
    size_t at, j;                       // the next bit, the next element
};

INLINE struct topk_2bit_reader topk_2bit_reader(const void *src, size_t count, double parameter)
{
    struct topk_2bit_reader reader = {.code = src, .of = topk_2bit_layout(parameter, count)};
    memcpy(reader.levels, src, sizeof reader.levels);
    return reader;
}

// The next element's index and the bits of its value; false: there are no more.
INLINE int topk_2bit_next(struct topk_2bit_reader *reader, const struct topk_element *element, size_t *index,
                          uint64_t *bits)
{
    const struct topk_2bit_layout *of = &reader->of;
    while (reader->j < of->k && reader->at < of->high_bits) {
        const uint32_t left = (uint32_t)(uint8_t)reader->code[CODEC_HEADER + reader->at / 8] >> reader->at % 8;
        if (left == 0) {
            reader->at = (reader->at | 7) + 1;
            continue;
        }
        const size_t at = reader->at + (size_t)__builtin_ctz(left), j = reader->j;
        if (at >= of->high_bits)
            return 0;
        *index = (at - j) << of->low_bits | topk_2bit_get(reader->code + of->low_at, j * of->low_bits, of->low_bits);
        const uint32_t code = topk_2bit_get(reader->code + of->codes_at, 2 * j, 2);
        *bits = reader->levels[code & 1] | (uint64_t)(code >> 1) << element->bits;
        reader->at = at + 1;
        reader->j++;
        return 1;
    }
    return 0;
}

// -------------------------------------------------------------------------------------------------------- element types

#ifdef VECTORS
#include <immintrin.h>

// 32 elements are compared at once, and only matches are handled one by one. Magnitudes are positive as signed numbers, and
// least - 1 is at least -1.

static uint32_t at_least_f32(const char *block, uint64_t least)
{
    const __m256i below = _mm256_set1_epi32((int)least - 1), mask = _mm256_set1_epi32(0x7fffffff);
    uint32_t found = 0;
    for (int v = 0; v < 4; v++) {
        const __m256i x = _mm256_and_si256(_mm256_loadu_si256((const void *)(block + 32 * v)), mask);
        const __m256i is_found = _mm256_cmpgt_epi32(x, below);
        found |= (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(is_found)) << 8 * v;
    }
    return found;
}

static uint32_t at_least_f64(const char *block, uint64_t least)
{
    const __m256i below = _mm256_set1_epi64x((long long)least - 1), mask = _mm256_set1_epi64x(INT64_MAX);
    uint32_t found = 0;
    for (int v = 0; v < 8; v++) {
        const __m256i x = _mm256_and_si256(_mm256_loadu_si256((const void *)(block + 32 * v)), mask);
        const __m256i is_found = _mm256_cmpgt_epi64(x, below);
        found |= (uint32_t)_mm256_movemask_pd(_mm256_castsi256_pd(is_found)) << 4 * v;
    }
    return found;
}

static uint32_t at_least_f16(const char *block, uint64_t least)
{
    const __m256i below = _mm256_set1_epi16((short)((int)least - 1)), mask = _mm256_set1_epi16(0x7fff);
    const __m256i a = _mm256_and_si256(_mm256_loadu_si256((const void *)block), mask);
    const __m256i b = _mm256_and_si256(_mm256_loadu_si256((const void *)(block + 32)), mask);
    const __m256i found = _mm256_packs_epi16(_mm256_cmpgt_epi16(a, below), _mm256_cmpgt_epi16(b, below));
    // packs works within each half of the register.
    return (uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(found, 0xd8));
}

static uint32_t at_least_bf16(const char *block, uint64_t least) { return at_least_f16(block, least); }

#define AT_LEAST(element) at_least_##element
#else
#define AT_LEAST(element) NULL
#endif

#define TOPK_CODEC(name, element)                                                       \
    ENCODE(name, element) { name##_encode(dst, src, count, options->parameter, &element); } \
    DECODE(name, element)                                                               \
    {                                                                                   \
        struct name##_reader reader = name##_reader(src, count, options->parameter);    \
        size_t index;                                                                   \
        uint64_t x = 0;                                                                 \
        if (count > 0)                                                                  \
            memset(dst, 0, count * element.size);                                       \
        while (name##_next(&reader, &element, &index, &x))                              \
            if (index < count)                                                          \
                memcpy((char *)dst + index * element.size, &x, element.size);           \
    }                                                                                   \
    DECODE_ADD(name, element)                                                           \
    {                                                                                   \
        struct name##_reader reader = name##_reader(src, count, options->parameter);    \
        size_t index;                                                                   \
        uint64_t x = 0;                                                                 \
        while (name##_next(&reader, &element, &index, &x))                              \
            if (index < count) {                                                        \
                char *sum = (char *)dst + 4 * index;                                    \
                store_f32(sum, (float)(load_f32(sum) + load_##element(&x)));            \
            }                                                                           \
    }

// infinity, nan: the magnitudes of an infinity and of a NaN.
#define TOPK_TYPE(element, size, infinity, nan)                                                                 \
    static double number_##element(uint64_t magnitude) { return load_##element(&magnitude); }                   \
    static uint64_t rounded_##element(double number)                                                            \
    {                                                                                                           \
        uint64_t magnitude = 0;                                                                                 \
        store_##element(&magnitude, number);                                                                    \
        return magnitude;                                                                                       \
    }                                                                                                           \
    static const struct topk_element element = {size, 8 * size - 1, infinity, nan, number_##element,            \
                                                rounded_##element, AT_LEAST(element)};                          \
    TOPK_CODEC(topk, element)                                                                                   \
    TOPK_CODEC(topk_2bit, element)
TOPK_TYPE(f32, 4, 0x7f800000, 0x7fc00000)
TOPK_TYPE(f16, 2, 0x7c00, 0x7e00)
TOPK_TYPE(bf16, 2, 0x7f80, 0x7fc0)
TOPK_TYPE(f64, 8, 0x7ff0000000000000, 0x7ff8000000000000)

static size_t topk_2bit_encoded_size(bhvd_dtype dtype, size_t count, const struct bhvd_codec_options *options)
{
    const struct topk_2bit_layout of = topk_2bit_layout(options->parameter, count);
    (void)dtype;
    return of.k == 0 && count > 0 ? 0 : of.size;
}

static size_t topk_encoded_size(bhvd_dtype dtype, size_t count, const struct bhvd_codec_options *options)
{
    const size_t k = topk_count(options->parameter, count);
    return k == 0 && count > 0 ? 0 : CODEC_HEADER + k * (sizeof(uint32_t) + bhvd_dtype_size(dtype));
}

void NAME(topk_kernels_init)(struct kernel_table *table)
{
    EACH_FLOAT_TYPE(CODEC_SET, BHVD_CODEC_TOPK, TOPK_VERSION, topk_encoded_size, topk, topk)
    EACH_FLOAT_TYPE(CODEC_SET, BHVD_CODEC_TOPK_2BIT, TOPK_2BIT_VERSION, topk_2bit_encoded_size, topk_2bit, topk_2bit)
}
