// Codecs that write bits: sign, sign_rms and ternary. Part of kernels.cu. A block of threads encodes one segment.

template <class real> __device__ void store_scale(uint8_t *header, real scale)
{
    memcpy(header, &scale, sizeof scale);
}

template <class real> __device__ real load_scale(const uint8_t *header)
{
    real scale;
    memcpy(&scale, header, sizeof scale);
    return scale == scale ? scale : (real)NAN;
}

// ------------------------------------------------------------------------------------------------------------- sign

// The first 16 threads sum, each its own elements one after the other: that order is the codec's definition
// (codec_sums.h). They take their time; other segments' blocks fill the GPU meanwhile.
template <class T> __device__ void sign_encode(const struct coded &coded, const void *src, bool squares)
{
    typedef typename T::real real;
    __shared__ double parts[CODEC_SUMS];
    __shared__ real shared_scale;
    const typename T::stored *from = (const typename T::stored *)src + coded.part.begin;
    uint8_t *header = coded.code, *bits = header + CODEC_HEADER;
    const uint64_t count = coded.part.count, bytes = sign_bits_size(count);
    if (!count)
        return;
    for (uint64_t at = threadIdx.x; at < bytes; at += blockDim.x) {
        unsigned byte = 0;
        for (uint64_t i = 8 * at; i < 8 * at + 8 && i < count; i++)
            byte |= (unsigned)(T::load(from + i) < 0) << i % 8;
        bits[at] = (uint8_t)byte;
    }
    if (threadIdx.x < CODEC_SUMS) {
        double part = 0;
        for (uint64_t i = threadIdx.x; i < count; i += CODEC_SUMS) {
            const double magnitude = fabs((double)T::load(from + i));
            part += squares ? magnitude * magnitude : magnitude;
        }
        parts[threadIdx.x] = part;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const real found = (real)sign_scale(codec_sums_total(parts), count, squares);
        shared_scale = found == found ? found : (real)NAN;
        codec_header_init(header, SIGN_VERSION, found == found);
        store_scale(header, shared_scale);
    }
    __syncthreads();
    for (uint64_t at = threadIdx.x; at < bytes && shared_scale != shared_scale; at += blockDim.x)
        bits[at] = 0;
}

template <class T> struct sign_decoder {
    typedef typename T::real real;
    const uint8_t *bits;
    real scale;

    __device__ sign_decoder(const uint8_t *code, uint64_t)
        : bits(code + CODEC_HEADER), scale(rounded<T>(load_scale<real>(code)))
    {
    }
    __device__ real element(uint64_t i) const
    {
        const bool negative = bits[i / 8] >> i % 8 & 1;
        return negative && scale == scale ? -scale : scale;
    }
    __device__ void four(uint64_t i, real *out) const
    {
        for (int j = 0; j < VECTOR; j++)
            out[j] = element(i + j);
    }
};

// ---------------------------------------------------------------------------------------------------------- ternary

__device__ static bool ternary_is_kept(float magnitude, float s, float u) { return ternary_float_is_kept(magnitude, s, u); }
__device__ static bool ternary_is_kept(double magnitude, double s, float u) { return ternary_double_is_kept(magnitude, s, u); }

template <class T> __device__ void ternary_encode(const struct coded &coded, const void *src, uint64_t seed)
{
    typedef typename T::real real;
    __shared__ struct range<real> all[BLOCK_MAX];
    const typename T::stored *from = (const typename T::stored *)src + coded.part.begin;
    uint8_t *header = coded.code;
    const uint64_t count = coded.part.count;
    const real largest = largest_of((real)0);
    struct range<real> own = {0, 0, 1};
    if (!count)
        return;
    for (uint64_t i = threadIdx.x; i < count; i += blockDim.x) {
        const real x = T::load(from + i), magnitude = x < 0 ? -x : x;
        const struct range<real> one = {0, magnitude, magnitude <= largest};
        merge(&own, &one);
    }
    merge_block(all, own);
    const bool is_finite = all[0].is_finite;
    const real s = is_finite ? all[0].mx : (real)NAN;
    if (threadIdx.x == 0) {
        codec_header_init(header, TERNARY_VERSION, is_finite);
        store_scale(header, s);
    }
    const uint64_t blocks = ternary_blocks_size(count) / sizeof(struct ternary_block);
    for (uint64_t b = threadIdx.x; b < blocks; b += blockDim.x) {
        struct ternary_block block = {0, 0};
        for (uint64_t i = b * TERNARY_BLOCK; i < (b + 1) * TERNARY_BLOCK && i < count; i++) {
            const real x = T::load(from + i), magnitude = x < 0 ? -x : x;
            const float u = codec_uniform(codec_key(seed, i), (uint32_t)i);
            const bool kept = is_finite && ternary_is_kept(magnitude, s, u);
            block.kept |= (uint32_t)kept << i % TERNARY_BLOCK;
            block.negative |= (uint32_t)(kept && x < 0) << i % TERNARY_BLOCK;
        }
        ((struct ternary_block *)(header + CODEC_HEADER))[b] = block;
    }
}

template <class T> struct ternary_decoder {
    typedef typename T::real real;
    const struct ternary_block *blocks;
    real scale;

    __device__ ternary_decoder(const uint8_t *code, uint64_t)
        : blocks((const struct ternary_block *)(code + CODEC_HEADER)), scale(rounded<T>(load_scale<real>(code)))
    {
    }
    __device__ real element(uint64_t i) const
    {
        const struct ternary_block *block = blocks + i / TERNARY_BLOCK;
        const real magnitude = block->kept >> i % TERNARY_BLOCK & 1 || scale != scale ? scale : 0;
        return block->negative >> i % TERNARY_BLOCK & 1 && scale == scale ? -magnitude : magnitude;
    }
    __device__ void four(uint64_t i, real *out) const
    {
        for (int j = 0; j < VECTOR; j++)
            out[j] = element(i + j);
    }
};

// option: whether squares are summed (sign_rms)
#define BITS_ENCODE(type)                                                                             \
    KERNEL(sign_encode_##type)(ENCODE_PARAMETERS) { sign_encode<type>(ENCODED, src, option != 0); }    \
    KERNEL(ternary_encode_##type)(ENCODE_PARAMETERS)                                                  \
    {                                                                                                 \
        const struct coded coded = ENCODED;                                                           \
        ternary_encode<type>(coded, src, segments_mix(seed, first + coded.part.begin));               \
    }
BITS_ENCODE(f32)
BITS_ENCODE(f64)
BITS_ENCODE(f16)
BITS_ENCODE(bf16)
