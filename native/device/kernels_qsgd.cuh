// Codec qsgd. Part of kernels.cu. A block of threads encodes QSGD_BLOCK elements.

// The arithmetic of qsgd.h by the type of its numbers.
template <class real> struct qsgd;
#define QSGD(real)                                                                                            \
    template <> struct qsgd<real> {                                                                           \
        __device__ static real norm(double squares, int levels, double largest)                               \
        {                                                                                                     \
            return qsgd_##real##_norm(squares, levels, largest);                                              \
        }                                                                                                     \
        __device__ static real scale(real norm, int levels) { return qsgd_##real##_scale(norm, levels); }     \
        __device__ static int quantize(real magnitude, real scale, int levels, float u)                       \
        {                                                                                                     \
            return (int)qsgd_##real##_quantize(magnitude, scale, levels, u);                                  \
        }                                                                                                     \
        __device__ static real dequantize(real q, real step, real norm)                                       \
        {                                                                                                     \
            return qsgd_##real##_dequantize(q, step, norm);                                                   \
        }                                                                                                     \
    };
QSGD(float)
QSGD(double)

// The largest number of each type.
template <class T> __device__ double largest_element();
template <> __device__ double largest_element<f32>() { return 3.4028234663852886e+38; }
template <> __device__ double largest_element<f64>() { return 1.7976931348623157e+308; }
template <> __device__ double largest_element<f16>() { return 65504; }
template <> __device__ double largest_element<bf16>() { return 3.3895313892515355e+38; }

template <class real> struct qsgd_code {
    real *norms;
    int8_t *codes;

    __device__ qsgd_code(const uint8_t *code, uint64_t count)
        : norms((real *)(code + CODEC_HEADER)),
          codes((int8_t *)(code + CODEC_HEADER + qsgd_norms_size(count, sizeof(real))))
    {
    }
};

// The first 16 threads sum in the order of codec_sums.h.
template <class T> __device__ void qsgd_encode(const struct coded &coded, const void *src, int levels, uint64_t seed)
{
    typedef typename T::real real;
    __shared__ double parts[CODEC_SUMS];
    __shared__ real norm;
    const typename T::stored *from = (const typename T::stored *)src + coded.part.begin;
    const struct qsgd_code<real> code(coded.code, coded.part.count);
    const uint64_t begin = coded.block * QSGD_BLOCK, end = begin + QSGD_BLOCK;
    if (begin >= coded.part.count)
        return;
    const uint64_t stop = end < coded.part.count ? end : coded.part.count;
    if (threadIdx.x < CODEC_SUMS) {
        double part = 0;
        for (uint64_t i = begin + threadIdx.x; i < stop; i += CODEC_SUMS) {
            const double x = T::load(from + i);
            part += x * x;
        }
        parts[threadIdx.x] = part;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const real found = qsgd<real>::norm(codec_sums_total(parts), levels, largest_element<T>());
        norm = found == found ? found : (real)NAN;
        code.norms[coded.block] = norm;
    }
    __syncthreads();
    const real scale = qsgd<real>::scale(norm, levels);
    for (uint64_t i = begin + threadIdx.x; i < stop; i += blockDim.x) {
        const real x = T::load(from + i);
        const float u = codec_uniform(codec_key(seed, i), (uint32_t)i);
        const int q = norm > 0 ? qsgd<real>::quantize(x < 0 ? -x : x, scale, levels, u) : 0;
        code.codes[i] = (int8_t)(x < 0 ? -q : q);
    }
}

// Afterwards, one block of threads for each segment: the header, and zeros up to the ends of norms and codes.
template <class real> __device__ void qsgd_header(const struct coded &coded, uint64_t levels)
{
    __shared__ int nans;
    const uint64_t count = coded.part.count, blocks = count / QSGD_BLOCK + (count % QSGD_BLOCK != 0);
    const struct qsgd_code<real> code(coded.code, count);
    if (!count)
        return;
    if (threadIdx.x == 0)
        nans = 0;
    __syncthreads();
    for (uint64_t i = threadIdx.x; i < blocks; i += blockDim.x) {
        if (code.norms[i] != code.norms[i])
            nans = 1;                   // by whomever: all write the same
    }
    __syncthreads();
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
    __device__ real element(uint64_t i) const
    {
        const real x = qsgd<real>::dequantize(code.codes[i], step, code.norms[i / QSGD_BLOCK]);
        return x == x ? x : (real)NAN;
    }
    __device__ void four(uint64_t i, real *out) const
    {
        for (int j = 0; j < VECTOR; j++)
            out[j] = element(i + j);
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
QSGD_ENCODE(f32)
QSGD_ENCODE(f64)
QSGD_ENCODE(f16)
QSGD_ENCODE(bf16)
