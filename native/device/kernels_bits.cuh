// Codecs that write bits: sign and sign_rms. Part of kernels.cu. Several blocks of threads encode a segment.

// Writes the bits, and the sum of each CODEC_SUMS_BLOCK elements to `sums`. Half a warp takes one such block, with element i in
// lane i mod CODEC_SUMS, in the order of codec_sums.h. Each lane keeps two of the block's 32 words of 16 bits.
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
