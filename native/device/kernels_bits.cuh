// Codecs that write bits: sign, sign_rms and ternary. Part of kernels.cu. Several blocks of threads encode a segment.

template <class real> __device__ void store_scale(uint8_t *header, real scale)
{
    *(real *)header = scale;
}

template <class real> __device__ real load_scale(const uint8_t *header)
{
    const real scale = *(const real *)header;
    return scale == scale ? scale : (real)NAN;
}

// ------------------------------------------------------------------------------------------------------------- sign

// The bits, and the sum of each CODEC_SUMS_BLOCK elements, in `sums`. Half a warp takes one such block, element i of it in lane
// i mod CODEC_SUMS: as codec_sums.h adds them. Its 32 words of 16 bits are kept by its lanes, two by each.
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

// Afterwards, one block of threads for each segment: the header, from the sums; all bits 0 where the scale is NaN.
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
        shared_scale = found == found ? found : (real)NAN;
        codec_header_init(header, SIGN_VERSION, found == found);
        store_scale(header, shared_scale);
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
        : bits(code + CODEC_HEADER), scale(rounded<T>(load_scale<real>(code)))
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

// ---------------------------------------------------------------------------------------------------------- ternary

__device__ static bool ternary_is_kept(float magnitude, float s, float u) { return ternary_float_is_kept(magnitude, s, u); }
__device__ static bool ternary_is_kept(double magnitude, double s, float u) { return ternary_double_is_kept(magnitude, s, u); }

// Second pass, after minmax_uint8_ranges and with the same grid: max |x| is that of the range's ends.
template <class T>
__device__ void ternary_encode(const struct coded &coded, const void *src, const void *ranges, uint64_t per_segment, uint64_t seed)
{
    typedef typename T::real real;
    const typename T::stored *from = (const typename T::stored *)src + coded.part.begin;
    uint8_t *header = coded.code;
    const uint64_t count = coded.part.count;
    if (!count)
        return;
    const struct range<real> range = range_of_segment<real>(coded, ranges, per_segment);
    const bool is_finite = range.is_finite;
    const real mx = range.mx > 0 ? range.mx : 0, s = is_finite ? (-range.mn > mx ? -range.mn : mx) : (real)NAN;
    if (coded.first == 0) {
        codec_header_init(header, TERNARY_VERSION, is_finite);
        store_scale(header, s);
    }
    const uint64_t blocks = ternary_blocks_size(count) / sizeof(struct ternary_block);
    const struct codec_key key = codec_key(seed, 0);    // segments are shorter than 2^32
    const unsigned lane = threadIdx.x % WARP;
    for (uint64_t b = coded.first / WARP; b < blocks; b += coded.step / WARP) {
        const uint64_t i = b * TERNARY_BLOCK + lane;
        const real x = i < count ? T::load(from + i) : 0, magnitude = x < 0 ? -x : x;
        const bool kept = is_finite && ternary_is_kept(magnitude, s, codec_uniform(key, (uint32_t)i));
        const struct ternary_block block = {__ballot_sync(0xffffffff, kept), __ballot_sync(0xffffffff, kept && x < 0)};
        if (lane == 0)
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
    __device__ real value(const struct ternary_block &block, unsigned bit) const
    {
        const real magnitude = block.kept >> bit & 1 || scale != scale ? scale : 0;
        return block.negative >> bit & 1 && scale == scale ? -magnitude : magnitude;
    }
    __device__ real element(uint64_t i) const { return value(blocks[i / TERNARY_BLOCK], i % TERNARY_BLOCK); }
    __device__ void four(uint64_t i, real *out) const
    {
        const uint2 words = ((const uint2 *)blocks)[i / TERNARY_BLOCK];
        const struct ternary_block block = {words.x, words.y};
        for (int j = 0; j < VECTOR; j++)
            out[j] = value(block, i % TERNARY_BLOCK + j);
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
    }                                                                                                             \
    KERNEL(ternary_encode_##type)(ENCODE_PARAMETERS)                                                              \
    {                                                                                                             \
        const struct coded coded = ENCODED;                                                                       \
        ternary_encode<type>(coded, src, ranges, per_segment, segments_mix(seed, first + coded.part.begin));      \
    }
BITS_ENCODE(f32)
BITS_ENCODE(f64)
BITS_ENCODE(f16)
BITS_ENCODE(bf16)
