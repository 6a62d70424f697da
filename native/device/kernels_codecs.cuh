// Part of kernels.cu. For all codecs: the segment of a block of threads, and decoding. Codecs minmax_uint8, sign and sign_rms.
//
// A vector of `count` elements is cut into chunks and segments (kernel/segments.h). The code of segment s of chunk k is at offset k
// chunk_stride + s segment_stride; an empty segment has none. `per_segment` blocks of threads work on each segment.

struct coded {
    uint8_t *code;
    struct segment_part part;           // of the vector; count 0: nothing to do
    uint64_t first, step;               // of this thread among the segment's threads
    uint64_t index, block;              // of the segment among all; of the block within the segment
};

__device__ static struct coded coded_of(const void *codes, uint64_t chunk_stride, uint64_t segment_stride, uint64_t count,
                                        uint64_t chunks, uint64_t segment, uint64_t per_segment)
{
    const struct segments cut = {count, chunks, segment};
    const uint64_t in_chunk = segments_in_chunk(&cut), index = blockIdx.x / per_segment, block = blockIdx.x % per_segment;
    const uint64_t k = index / in_chunk, s = index % in_chunk;
    struct coded coded = {(uint8_t *)codes + k * chunk_stride + s * segment_stride, segments_part(&cut, k, s),
                          block * blockDim.x + threadIdx.x, per_segment * blockDim.x, index, block};
    return coded;
}

// The total of codec.h, in the first lane of each half of a warp.
__device__ static double sum_of_half_warp(double part)
{
    for (int w = CODEC_SUMS / 2; w > 0; w /= 2)
        part += __shfl_down_sync(0xffffffff, part, w, CODEC_SUMS);
    return part;
}

// The parameters of all encoding kernels. src: the vector; ranges: scratch memory, three elements for each block (minmax_uint8), or
// a double for every CODEC_SUMS_BLOCK elements of the longest segment (sign); option: the codec's own parameter; seed: already
// mixed with the rank and the pass; first: offset of the vector in the operation's.
#define ENCODE_PARAMETERS                                                                                       \
    void *dst, uint64_t chunk_stride, uint64_t segment_stride, const void *src, uint64_t count, uint64_t chunks, \
        uint64_t segment, uint64_t per_segment, void *ranges, uint64_t option, uint64_t seed, uint64_t first
#define ENCODED coded_of(dst, chunk_stride, segment_stride, count, chunks, segment, per_segment)

// A codec's Decoder<T> is constructed for one code of `count` elements. element(i) is the decoded element before it is rounded to
// the type; four(i, out) the same for VECTOR elements from i on, a multiple of VECTOR.
template <class Decoder, class T> __device__ void decode_segment(const struct coded &coded, void *dst)
{
    typename T::stored *to = (typename T::stored *)dst + coded.part.begin;
    const Decoder decoder(coded.code, coded.part.count);
    for_elements(
        coded.part.count, is_aligned<typename T::stored>(to), [&](uint64_t i) { T::store(to + i, decoder.element(i)); },
        [&](uint64_t i) {
            typename T::real in[VECTOR];
            vector<typename T::stored> out;
            decoder.four(i, in);
            for (int j = 0; j < VECTOR; j++)
                T::store(&out.at[j], in[j]);
            store_vector(to + i, out);
        },
        coded.first, coded.step);
}

enum { SUM_GROUPS = 4 };        // of VECTOR elements per construction of each rank's decoder, which divides in float64

// dst = factor * the sum over ranks, each element rounded to the type before it is added, in float32 and in rank order; the ranks'
// codes are rank_stride apart.
template <class Decoder, class T>
__device__ void decode_sum_segment(const struct coded &coded, void *dst, uint64_t rank_stride, uint64_t ranks, double factor)
{
    typename T::stored *to = (typename T::stored *)dst + coded.part.begin;
    const float by = (float)factor;
    auto finish = [&](float total) {
        return canonical((typename T::real)(factor == 1.0 ? total : total * by));
    };
    const uint64_t count = coded.part.count, groups = is_aligned<typename T::stored>(to) ? count / VECTOR : 0;
    for (uint64_t begin = coded.first; begin < groups; begin += SUM_GROUPS * coded.step) {
        float total[SUM_GROUPS][VECTOR] = {};
        for (uint64_t r = 0; r < ranks; r++) {
            const Decoder decoder(coded.code + r * rank_stride, count);
#pragma unroll                          // so that totals are in registers
            for (int k = 0; k < SUM_GROUPS; k++) {
                const uint64_t g = begin + k * coded.step;
                typename T::real in[VECTOR];
                if (g >= groups)
                    break;
                decoder.four(g * VECTOR, in);
                for (int j = 0; j < VECTOR; j++)
                    total[k][j] = (float)(total[k][j] + rounded<T>(in[j]));
            }
        }
#pragma unroll
        for (int k = 0; k < SUM_GROUPS; k++) {
            const uint64_t g = begin + k * coded.step;
            vector<typename T::stored> out;
            if (g >= groups)
                break;
            for (int j = 0; j < VECTOR; j++)
                T::store(&out.at[j], finish(total[k][j]));
            store_vector(to + g * VECTOR, out);
        }
    }
    for (uint64_t i = groups * VECTOR + coded.first; i < count; i += coded.step) {
        float total = 0;
        for (uint64_t r = 0; r < ranks; r++)
            total = (float)(total + rounded<T>(Decoder(coded.code + r * rank_stride, count).element(i)));
        T::store(to + i, finish(total));
    }
}

// dst += the decoded elements, each rounded to the type, in float32.
template <class Decoder, class T> __device__ void decode_add_segment(const struct coded &coded, float *dst)
{
    float *to = dst + coded.part.begin;
    const Decoder decoder(coded.code, coded.part.count);
    auto add = [](float *at, typename T::real x) {
        const float total = (float)(*at + rounded<T>(x));
        *at = canonical(total);
    };
    for_elements(
        coded.part.count, is_aligned<float>(to), [&](uint64_t i) { add(to + i, decoder.element(i)); },
        [&](uint64_t i) {
            typename T::real in[VECTOR];
            vector<float> out = load_vector(to + i);
            decoder.four(i, in);
            for (int j = 0; j < VECTOR; j++)
                add(&out.at[j], in[j]);
            store_vector(to + i, out);
        },
        coded.first, coded.step);
}

// The parameters of all decoding kernels, and of all that sum over ranks, with vectors of one chunk. option: the codec's own
// parameter.
#define DECODE_PARAMETERS(element)                                                                                      \
    element *dst, const void *src, uint64_t chunk_stride, uint64_t segment_stride, uint64_t count, uint64_t chunks,     \
        uint64_t segment, uint64_t per_segment, uint64_t option
#define DECODED coded_of(src, chunk_stride, segment_stride, count, chunks, segment, per_segment)
#define SUM_PARAMETERS                                                                                              \
    void *dst, const void *src, uint64_t rank_stride, uint64_t segment_stride, uint64_t ranks, uint64_t count,      \
        uint64_t segment, uint64_t per_segment, double factor, uint64_t option
#define SUMMED coded_of(src, 0, segment_stride, count, 1, segment, per_segment)

#define CODEC_DECODERS(codec, type)                                                                                 \
    KERNEL(codec##_decode_##type)(DECODE_PARAMETERS(void))                                                          \
    {                                                                                                               \
        decode_segment<codec##_decoder<type>, type>(DECODED, dst);                                                  \
    }                                                                                                               \
    KERNEL(codec##_decode_add_##type)(DECODE_PARAMETERS(float))                                                     \
    {                                                                                                               \
        decode_add_segment<codec##_decoder<type>, type>(DECODED, dst);                                              \
    }                                                                                                               \
    KERNEL(codec##_decode_sum_##type)(SUM_PARAMETERS)                                                               \
    {                                                                                                               \
        decode_sum_segment<codec##_decoder<type>, type>(SUMMED, dst, rank_stride, ranks, factor);                   \
    }

// ------------------------------------------------------------------------------------------------------- minmax_uint8

template <class real> struct range {
    real mn, mx;
    int is_finite;
};

template <class real> __device__ void merge(struct range<real> *into, const struct range<real> *other)
{
    into->is_finite &= other->is_finite;
    into->mn = other->mn < into->mn ? other->mn : into->mn;
    into->mx = other->mx > into->mx ? other->mx : into->mx;
}

// Reduces all threads' own ranges to all[0].
template <class real> __device__ void merge_block(struct range<real> *all, struct range<real> own)
{
    all[threadIdx.x] = own;
    __syncthreads();
    for (unsigned half = BLOCK_MAX / 2; half > 0; half /= 2) {
        if (threadIdx.x < half && threadIdx.x + half < blockDim.x)
            merge(&all[threadIdx.x], &all[threadIdx.x + half]);
        __syncthreads();
    }
}

template <class T> __device__ struct range<typename T::real> range_of(typename T::real x)
{
    const typename T::real largest = T::largest;
    struct range<typename T::real> range = {x, x, x >= -largest && x <= largest};
    return range;
}

// The grid of a segment between mn and mx, unless it is constant.
template <class real> struct minmax_grid {
    decltype(ARITHMETIC(minmax_uint8, grid)(0, 0)) grid;
    bool constant;

    __device__ minmax_grid(real mn, real mx) : constant(!(mx > mn))
    {
        if (!constant)
            grid = ARITHMETIC(minmax_uint8, grid)(mn, mx);
    }
};

// First pass: every block writes the range of its part of the segment.
template <class T> __device__ void minmax_ranges(const struct coded &coded, const void *src, void *ranges)
{
    typedef typename T::real real;
    typedef typename T::stored stored;
    __shared__ struct range<real> all[BLOCK_MAX];
    const stored *from = (const stored *)src + coded.part.begin;
    if (!coded.part.count)
        return;
    struct range<real> own = range_of<T>(T::load(from));
    auto take = [&](real x) {
        const struct range<real> one = range_of<T>(x);
        merge(&own, &one);
    };
    for_elements(
        coded.part.count, is_aligned<stored>(from), [&](uint64_t i) { take(T::load(from + i)); },
        [&](uint64_t i) {
            const vector<stored> in = load_vector(from + i);
            for (int k = 0; k < VECTOR; k++)
                take(T::load(&in.at[k]));
        },
        coded.first, coded.step);
    merge_block(all, own);
    if (threadIdx.x == 0)
        ((struct range<real> *)ranges)[blockIdx.x] = all[0];
}

// After the first pass, with the same grid: the range of a whole segment. All threads of a block must call it.
template <class real>
__device__ struct range<real> range_of_segment(const struct coded &coded, const void *ranges, uint64_t per_segment)
{
    __shared__ struct range<real> all[BLOCK_MAX];
    const struct range<real> *mine = (const struct range<real> *)ranges + coded.index * per_segment;
    struct range<real> own = mine[0];
    for (uint64_t i = threadIdx.x; i < per_segment; i += blockDim.x)
        merge(&own, &mine[i]);
    merge_block(all, own);
    return all[0];
}

// Second pass.
template <class T>
__device__ void minmax_encode(const struct coded &coded, const void *src, const void *ranges, uint64_t per_segment)
{
    typedef typename T::real real;
    typedef typename T::stored stored;
    uint8_t *header = coded.code, *codes = header + CODEC_HEADER;
    if (!coded.part.count)
        return;
    const struct range<real> range = range_of_segment<real>(coded, ranges, per_segment);
    const real mn = range.is_finite ? range.mn + 0 : (real)NAN, mx = range.is_finite ? range.mx + 0 : (real)NAN;
    const struct minmax_grid<real> by(mn, mx);
    map<u8, T>(
        codes, (const stored *)src + coded.part.begin, coded.part.count,
        [&](real x) { return by.constant ? (uint8_t)0 : (uint8_t)(int)ARITHMETIC(minmax_uint8, quantize)(&by.grid, x); },
        coded.first, coded.step);
    if (coded.first == 0) {
        codec_header_init(header, MINMAX_UINT8_VERSION, range.is_finite);
        T::store((stored *)header, mn);
        T::store((stored *)header + 1, mx);
        for (uint64_t i = coded.part.count; i < codec_padded(coded.part.count); i++)
            codes[i] = 0;
    }
}

template <class T> struct minmax_uint8_decoder {
    typedef typename T::real real;
    const uint8_t *codes;
    real mn;
    struct minmax_grid<real> by;

    __device__ minmax_uint8_decoder(const uint8_t *code, uint64_t)
        : codes(code + CODEC_HEADER), mn(T::load((const typename T::stored *)code)),
          by(mn, T::load((const typename T::stored *)code + 1))
    {
    }
    __device__ real value(uint8_t q) const { return by.constant ? mn : ARITHMETIC(minmax_uint8, dequantize)(&by.grid, q); }
    __device__ real element(uint64_t i) const { return value(codes[i]); }
    __device__ void four(uint64_t i, real *out) const
    {
        const vector<uint8_t> in = load_vector(codes + i);
        for (int j = 0; j < VECTOR; j++)
            out[j] = value(in.at[j]);
    }
};

#define MINMAX_ENCODE(type)                                                                             \
    KERNEL(minmax_uint8_ranges_##type)(ENCODE_PARAMETERS) { minmax_ranges<type>(ENCODED, src, ranges); } \
    KERNEL(minmax_uint8_encode_##type)(ENCODE_PARAMETERS) { minmax_encode<type>(ENCODED, src, ranges, per_segment); }
EACH_TYPE(MINMAX_ENCODE)

// ----------------------------------------------------------------------------------------------------- sign, sign_rms

// Several blocks of threads encode a segment.

// Writes the bits, and the sum of each CODEC_SUMS_BLOCK elements to `sums`. Half a warp takes one such block, with element i in
// lane i mod CODEC_SUMS, in the order of codec.h. Each lane keeps two of the block's 32 words of 16 bits.
template <class T> __device__ void sign_encode(const struct coded &coded, const void *src, double *sums, bool squares)
{
    typedef typename T::real real;
    const typename T::stored *from = (const typename T::stored *)src + coded.part.begin;
    uint32_t *words = (uint32_t *)(coded.code + CODEC_HEADER);
    const uint64_t count = coded.part.count, blocks = codec_sums_blocks(count);
    const unsigned half = threadIdx.x % WARP / CODEC_SUMS, j = threadIdx.x % CODEC_SUMS;
    for (uint64_t pair = coded.first / WARP; 2 * pair < blocks; pair += coded.step / WARP) {
        const uint64_t block = 2 * pair + half, begin = block * CODEC_SUMS_BLOCK;
        double part = 0;
        uint32_t word = 0;
        for (unsigned k = 0; k < CODEC_SUMS_BLOCK / CODEC_SUMS; k++) {
            const uint64_t i = begin + k * CODEC_SUMS + j;
            const real x = i < count ? T::load(from + i) : 0;
            const double magnitude = fabs((double)x);
            const uint32_t negative = __ballot_sync(0xffffffff, x < 0) >> half * CODEC_SUMS & 0xffff;
            word |= k / 2 == j ? negative << k % 2 * 16 : 0;
            part += squares ? magnitude * magnitude : magnitude;
        }
        part = sum_of_half_warp(part);
        if (j == 0 && block < blocks)
            sums[block] = part;
        if (sizeof word * (begin / 32 + j) < sign_bits_size(count))
            words[begin / 32 + j] = word;
    }
}

// Runs afterwards, one block of threads per segment: writes the header, from the sums; clears all bits if the scale is NaN.
template <class T> __device__ void sign_header(const struct coded &coded, const double *sums, bool squares)
{
    typedef typename T::real real;
    __shared__ double parts[CODEC_SUMS];
    __shared__ real shared_scale;
    uint8_t *header = coded.code;
    const uint64_t count = coded.part.count, blocks = codec_sums_blocks(count);
    if (!count)
        return;
    for (unsigned j = threadIdx.x; j < CODEC_SUMS; j += blockDim.x) {
        parts[j] = 0;
        for (uint64_t block = j; block < blocks; block += CODEC_SUMS)
            parts[j] += sums[block];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const real found = (real)sign_scale(codec_sums_total(parts), count, squares);
        shared_scale = canonical(found);
        codec_header_init(header, SIGN_VERSION, found == found);
        *(real *)header = shared_scale;
    }
    __syncthreads();
    for (uint64_t at = threadIdx.x; at < sign_bits_size(count) && shared_scale != shared_scale; at += blockDim.x)
        header[CODEC_HEADER + at] = 0;
}

template <class T> struct sign_decoder {
    typedef typename T::real real;
    const uint8_t *bits;
    real scale;

    __device__ sign_decoder(const uint8_t *code, uint64_t)
        : bits(code + CODEC_HEADER), scale(rounded<T>(canonical(*(const real *)code)))
    {
    }
    __device__ real value(unsigned negative) const { return negative & 1 && scale == scale ? -scale : scale; }
    __device__ real element(uint64_t i) const { return value(bits[i / 8] >> i % 8); }
    __device__ void four(uint64_t i, real *out) const
    {
        const unsigned byte = bits[i / 8];
        for (int j = 0; j < VECTOR; j++)
            out[j] = value(byte >> (i % 8 + j));
    }
};

// option: whether squares are summed (sign_rms)
#define SUMS ((double *)ranges + coded.index * codec_sums_blocks(segment))
#define BITS_ENCODE(type)                                                                                         \
    KERNEL(sign_encode_##type)(ENCODE_PARAMETERS)                                                                 \
    {                                                                                                             \
        const struct coded coded = ENCODED;                                                                       \
        sign_encode<type>(coded, src, SUMS, option != 0);                                                         \
    }                                                                                                             \
    KERNEL(sign_header_##type)(ENCODE_PARAMETERS)                                                                 \
    {                                                                                                             \
        const struct coded coded = ENCODED;                                                                       \
        sign_header<type>(coded, SUMS, option != 0);                                                              \
    }
EACH_TYPE(BITS_ENCODE)

#define CODECS_DECODERS(type)            \
    CODEC_DECODERS(minmax_uint8, type)   \
    CODEC_DECODERS(sign, type)
EACH_TYPE(CODECS_DECODERS)
