// Shared by the codecs' kernels: the segment of a block of threads, and decoding. Part of kernels.cu.
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

// The total of codec_sums.h, in the first lane of each half of a warp.
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
