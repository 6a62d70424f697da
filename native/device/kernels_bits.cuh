// Codecs that write bits: sign, sign_rms and ternary. Part of kernels.cu. Several blocks of threads encode a segment.

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

// The bits, and the sums of CODEC_SUMS_BLOCK elements each, as many at a time as there are CODEC_SUMS threads for one: a double
// for each in `sums`, those of a segment one after the other.
template <class T> __device__ void sign_encode(const struct coded &coded, const void *src, double *sums, bool squares,
                                               uint64_t per_segment)
{
    enum { AT_ONCE = BLOCK_MAX / CODEC_SUMS, COUNT = AT_ONCE * CODEC_SUMS_BLOCK };
    __shared__ double parts[AT_ONCE][CODEC_SUMS];
    const typename T::stored *from = (const typename T::stored *)src + coded.part.begin;
    uint8_t *bits = coded.code + CODEC_HEADER;
    const uint64_t count = coded.part.count;
    for (uint64_t begin = coded.block * COUNT; begin < count; begin += per_segment * COUNT) {
        const uint64_t stop = count - begin < COUNT ? count : begin + COUNT, blocks = codec_sums_blocks(stop - begin);
        for (uint64_t at = begin / 8 + threadIdx.x; at < (begin + COUNT) / 8 && at < sign_bits_size(count);
             at += blockDim.x) {
            unsigned byte = 0;
            for (uint64_t i = 8 * at; i < 8 * at + 8 && i < count; i++)
                byte |= (unsigned)(T::load(from + i) < 0) << i % 8;
            bits[at] = (uint8_t)byte;
        }
        for (unsigned t = threadIdx.x; t < blocks * CODEC_SUMS; t += blockDim.x) {
            const unsigned block = t / CODEC_SUMS, j = t % CODEC_SUMS;
            const uint64_t first = begin + block * CODEC_SUMS_BLOCK, end = first + CODEC_SUMS_BLOCK;
            double part = 0;
            for (uint64_t i = first + j; i < end && i < stop; i += CODEC_SUMS) {
                const double magnitude = fabs((double)T::load(from + i));
                part += squares ? magnitude * magnitude : magnitude;
            }
            parts[block][j] = part;
        }
        __syncthreads();
        for (unsigned block = threadIdx.x; block < blocks; block += blockDim.x)
            sums[begin / CODEC_SUMS_BLOCK + block] = codec_sums_total(parts[block]);
        __syncthreads();
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
    for (uint64_t b = coded.first; b < blocks; b += coded.step) {
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
#define SUMS ((double *)ranges + coded.index * codec_sums_blocks(segment))
#define BITS_ENCODE(type)                                                                                         \
    KERNEL(sign_encode_##type)(ENCODE_PARAMETERS)                                                                 \
    {                                                                                                             \
        const struct coded coded = ENCODED;                                                                       \
        sign_encode<type>(coded, src, SUMS, option != 0, per_segment);                                            \
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
