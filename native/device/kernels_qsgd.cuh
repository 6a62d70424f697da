// Codec qsgd. Part of kernels.cu. Half a warp encodes QSGD_BLOCK elements.

template <class real> struct qsgd_code {
    real *norms;
    int8_t *codes;

    __device__ qsgd_code(const uint8_t *code, uint64_t count)
        : norms((real *)(code + CODEC_HEADER)),
          codes((int8_t *)(code + CODEC_HEADER + qsgd_norms_size(count, sizeof(real))))
    {
    }
};

// Lane j of each half sums elements j mod CODEC_SUMS, like codec_sums.h, and encodes four neighbours at a time.
template <class T> __device__ void qsgd_encode(const struct coded &coded, const void *src, int levels, uint64_t seed)
{
    typedef typename T::real real;
    typedef typename T::stored stored;
    const stored *from = (const stored *)src + coded.part.begin;
    const uint64_t count = coded.part.count;
    const struct qsgd_code<real> code(coded.code, count);
    const struct codec_key key = codec_key(seed, 0);    // segments are shorter than 2^32
    const unsigned half = threadIdx.x % WARP / CODEC_SUMS, j = threadIdx.x % CODEC_SUMS;
    const bool vectors = is_aligned<stored>(from);
    for (uint64_t pair = coded.first / WARP; 2 * pair * QSGD_BLOCK < count; pair += coded.step / WARP) {
        const uint64_t block = 2 * pair + half, begin = block * QSGD_BLOCK, end = begin + QSGD_BLOCK;
        double part = 0;
        for (uint64_t i = begin + j; i < end; i += CODEC_SUMS) {
            const double x = i < count ? T::load(from + i) : 0;
            part += x * x;
        }
        const double squares = __shfl_sync(0xffffffff, sum_of_half_warp(part), 0, CODEC_SUMS);
        const real found = ARITHMETIC(qsgd, norm)(squares, levels, T::largest), norm = canonical(found);
        const real scale = ARITHMETIC(qsgd, scale)(norm, levels);
        if (j == 0 && begin < count)
            code.norms[block] = norm;
        auto quantized = [&](real x, uint64_t i) {
            const float u = codec_uniform(key, (uint32_t)i);
            const int q = norm > 0 ? (int)ARITHMETIC(qsgd, quantize)(x < 0 ? -x : x, scale, levels, u) : 0;
            return (int8_t)(x < 0 ? -q : q);
        };
        for (uint64_t i = begin + VECTOR * j; i < end && i < count; i += VECTOR * CODEC_SUMS) {
            if (vectors && i + VECTOR <= count) {
                const vector<stored> in = load_vector(from + i);
                vector<int8_t> out;
                for (int k = 0; k < VECTOR; k++)
                    out.at[k] = quantized(T::load(&in.at[k]), i + k);
                store_vector(code.codes + i, out);
                continue;
            }
            for (uint64_t k = i; k < i + VECTOR && k < count; k++)
                code.codes[k] = quantized(T::load(from + k), k);
        }
    }
}

// Runs afterwards, one block of threads per segment: writes the header, and zeros up to the ends of norms and codes.
template <class real> __device__ void qsgd_header(const struct coded &coded, uint64_t levels)
{
    int found = 0;
    const uint64_t count = coded.part.count, blocks = count / QSGD_BLOCK + (count % QSGD_BLOCK != 0);
    const struct qsgd_code<real> code(coded.code, count);
    if (!count)
        return;
    for (uint64_t i = threadIdx.x; i < blocks; i += blockDim.x)
        found |= code.norms[i] != code.norms[i];
    const int nans = __syncthreads_or(found);
    if (threadIdx.x != 0)
        return;
    codec_header_init(coded.code, QSGD_VERSION, !nans);
    coded.code[QSGD_LEVELS_AT] = (uint8_t)levels;
    for (uint64_t i = blocks; i < qsgd_norms_size(count, sizeof(real)) / sizeof(real); i++)
        code.norms[i] = 0;
    for (uint64_t i = count; i < codec_padded(count); i++)
        code.codes[i] = 0;
}

template <class T> struct qsgd_decoder {
    typedef typename T::real real;
    struct qsgd_code<real> code;
    real step;

    __device__ qsgd_decoder(const uint8_t *at, uint64_t count) : code(at, count), step(1 / (real)at[QSGD_LEVELS_AT]) {}
    __device__ real value(int8_t q, real norm) const
    {
        const real x = ARITHMETIC(qsgd, dequantize)(q, step, norm);
        return canonical(x);
    }
    __device__ real element(uint64_t i) const { return value(code.codes[i], code.norms[i / QSGD_BLOCK]); }
    __device__ void four(uint64_t i, real *out) const
    {
        const vector<int8_t> in = load_vector(code.codes + i);
        const real norm = code.norms[i / QSGD_BLOCK];
        for (int j = 0; j < VECTOR; j++)
            out[j] = value(in.at[j], norm);
    }
};

// option: the levels
#define QSGD_ENCODE(type)                                                                                     \
    KERNEL(qsgd_encode_##type)(ENCODE_PARAMETERS)                                                             \
    {                                                                                                         \
        const struct coded coded = ENCODED;                                                                   \
        qsgd_encode<type>(coded, src, (int)option, segments_mix(seed, first + coded.part.begin));             \
    }                                                                                                         \
    KERNEL(qsgd_header_##type)(ENCODE_PARAMETERS) { qsgd_header<type::real>(ENCODED, option); }
EACH_TYPE(QSGD_ENCODE)
