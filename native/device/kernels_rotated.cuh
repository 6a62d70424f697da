// Codecs rotated1 to rotated4. Part of kernels.cu. A warp works on one block of D elements at a time. In every vector of D elements
// a lane accesses only the elements i = lane mod 32, so no synchronization is needed.

enum {
    ROTATED_SCRATCH = 4 * ROTATED_LARGEST_BLOCK,  // floats of shared memory per block of threads: two vectors for each warp
    ROTATED_STEPS = ROTATED_PACK / WARP           // elements of a pack per lane
};
#define ALL_LANES 0xffffffffu

// A segment's code, and the warp that works on it.
struct rotated {
    int bits;
    uint64_t size, count;
    uint64_t first, step;               // index of the warp's first block, and distance to its next
    float *values, *sum;                // the warp's two vectors
    unsigned lane;
    float level;                        // level number lane mod 8
};

__device__ static struct rotated rotated_of(const struct coded &coded, uint64_t option)
{
    __shared__ float scratch[ROTATED_SCRATCH];
    struct rotated r;
    r.bits = (int)(option & 255);
    r.size = option >> 8;
    r.count = coded.part.count;
    r.lane = threadIdx.x % WARP;
    const uint64_t fit = ROTATED_SCRATCH / (2 * r.size), warps = blockDim.x / WARP, used = warps < fit ? warps : fit;
    const uint64_t warp = threadIdx.x / WARP;
    r.first = warp < used ? coded.block * used + warp : r.count;      // past the end: not enough shared memory for this warp
    r.step = coded.step / blockDim.x * used;
    r.values = scratch + 2 * r.size * (warp % used);
    r.sum = r.values + r.size;
    r.level = ROTATED_LEVELS[r.bits - 1].level[r.lane % 8];
    return r;
}

__device__ static uint64_t rotated_code_key(const uint8_t *code) { return *(const uint64_t *)code; }
__device__ static float *rotated_scales(const uint8_t *code) { return (float *)(code + CODEC_HEADER); }

__device__ static uint8_t *rotated_codes(const struct rotated &r, const uint8_t *code, uint64_t begin)
{
    return (uint8_t *)code + CODEC_HEADER + rotated_scales_size(r.count, r.size) + begin / 8 * r.bits;
}

// The signs of the lane's elements of a pack, which begins at element `begin` of the segment, in the lowest bits of flip[k].
__device__ static void pack_signs(const struct rotated &r, uint64_t key, uint64_t begin, uint32_t *flip)
{
    const uint32_t word = codec_word(codec_key(key, 0), (uint32_t)(begin / WARP) + r.lane % ROTATED_STEPS);
    for (int k = 0; k < ROTATED_STEPS; k++)
        flip[k] = __shfl_sync(ALL_LANES, word, k) >> r.lane & 1;
}

__device__ static float flipped(float x, uint32_t flip) { return float_from_bits(bits_from_float(x) ^ flip << 31); }

// In place: butterflies of distances below 32 between lanes, those within a pack in registers, longer ones in the vector.
__device__ static void transform(const struct rotated &r, float *a, uint64_t d)
{
    for (uint64_t begin = r.lane; begin < d; begin += ROTATED_PACK) {
        float x[ROTATED_STEPS];
        for (int k = 0; k < ROTATED_STEPS; k++)
            x[k] = a[begin + k * WARP];
        for (unsigned h = 1; h < WARP; h *= 2) {
            for (int k = 0; k < ROTATED_STEPS; k++)
                x[k] = __shfl_xor_sync(ALL_LANES, x[k], h) + flipped(x[k], (r.lane & h) != 0);
        }
#pragma unroll
        for (int h = 1; h < ROTATED_STEPS; h *= 2) {
#pragma unroll
            for (int k = 0; k < ROTATED_STEPS; k++) {
                if (k & h)
                    continue;
                const float low = x[k], high = x[k + h];
                x[k] = low + high;
                x[k + h] = low - high;
            }
        }
        for (int k = 0; k < ROTATED_STEPS; k++)
            a[begin + k * WARP] = x[k];
    }
    for (uint64_t h = ROTATED_PACK; h < d; h *= 2) {
        for (uint64_t i = r.lane; i < d; i += WARP) {
            if (i & h)
                continue;
            const float low = a[i], high = a[i + h];
            a[i] = low + high;
            a[i + h] = low - high;
        }
    }
}

// The total, in all lanes, of ROTATED_SUMS partial sums; each lane passes numbers lane and lane + 32.
__device__ static float sums_total(float low, float high)
{
    float sum = low + high;
    for (int w = WARP / 2; w > 0; w /= 2)
        sum += __shfl_down_sync(ALL_LANES, sum, w);
    return __shfl_sync(ALL_LANES, sum, 0);
}

__device__ static float squares(const struct rotated &r, const float *a, uint64_t d)
{
    float low = 0, high = 0;
    for (uint64_t i = r.lane; i < d; i += 2 * WARP) {
        low += a[i] * a[i];
        high += a[i + WARP] * a[i + WARP];
    }
    return sums_total(low, high);
}

// Bit offsets in a pack's code, as one 64-bit number: of the lane's first number, and of its sign; the next ones follow at twice
// the width of a number. Lanes i and i + 16 share a code and have alternate numbers of it.
struct bit_offsets {
    int number, sign, numbers, signs;   // the last two: distances to the next
};

__device__ static struct bit_offsets bit_offsets_of(const struct rotated &r)
{
    const int bits = r.bits == 3 ? 2 : r.bits, half = (int)r.lane / 16;
    struct bit_offsets at = {bits * half, bits * half + bits - 1, 2 * bits, 2 * bits};
    if (r.bits == 3) {
        at.sign = 32 + half;
        at.signs = 2;
    }
    return at;
}

// Writes the block's codes; returns sum_i |a_i| L[q_i].
__device__ static float quantize(const struct rotated &r, uint8_t *codes, const float *a, uint64_t d, float s)
{
    float limit[7], sums[2] = {0, 0};
    for (int k = 0; k < 7; k++)
        limit[k] = k < (1 << (r.bits - 1)) - 1 ? ROTATED_LEVELS[r.bits - 1].threshold[k] * s : INFINITY;
    for (uint64_t begin = 0; begin < d; begin += ROTATED_PACK, codes += r.bits * ROTATED_PART) {
        struct bit_offsets at = bit_offsets_of(r);
        uint64_t code = 0;
        for (int k = 0; k < ROTATED_STEPS; k++, at.number += at.numbers, at.sign += at.signs) {
            const float x = a[begin + k * WARP + r.lane], magnitude = fabsf(x);
            unsigned q = magnitude > limit[0];
            for (int j = 1; j < 3 && r.bits > 2; j++)
                q += magnitude > limit[j];
            for (int j = 3; j < 7 && r.bits > 3; j++)
                q += magnitude > limit[j];
            sums[k % 2] += magnitude * __shfl_sync(ALL_LANES, r.level, q);
            code |= (uint64_t)q << at.number | (uint64_t)(bits_from_float(x) >> 31) << at.sign;
        }
        code |= __shfl_xor_sync(ALL_LANES, code, WARP / 2);
        for (int p = (int)r.lane / 16; p < r.bits; p += 2)
            ((uint16_t *)codes)[16 * p + r.lane % 16] = (uint16_t)(code >> 16 * p);
    }
    return sums_total(sums[0], sums[1]);
}

// a = z, or a += z
__device__ static void dequantize(const struct rotated &r, float *a, const uint8_t *codes, uint64_t d, float t, bool adds)
{
    const unsigned levels = (1u << (r.bits - 1)) - 1;
    for (uint64_t begin = r.lane; begin < d; begin += ROTATED_PACK, codes += r.bits * ROTATED_PART) {
        struct bit_offsets at = bit_offsets_of(r);
        uint64_t code = 0;
        for (int p = 0; p < r.bits; p++)
            code |= (uint64_t)((const uint16_t *)codes)[16 * p + r.lane % 16] << 16 * p;
        for (int k = 0; k < ROTATED_STEPS; k++, at.number += at.numbers, at.sign += at.signs) {
            const float level = __shfl_sync(ALL_LANES, r.level, (unsigned)(code >> at.number) & levels);
            const float z = flipped(level * t, (uint32_t)(code >> at.sign) & 1);
            a[begin + k * WARP] = adds ? a[begin + k * WARP] + z : z;
        }
    }
}

// rotated_kernels.c: normalize. All lanes return the same.
__device__ static double normalize(const struct rotated &r, float *a, uint64_t d)
{
    float largest = 0;
    bool is_finite = true;
    for (uint64_t i = r.lane; i < d; i += WARP) {
        is_finite &= fabsf(a[i]) <= (float)f32::largest;
        largest = fabsf(a[i]) > largest ? fabsf(a[i]) : largest;
    }
    for (int w = WARP / 2; w > 0; w /= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, largest, w);
        largest = other > largest ? other : largest;
    }
    if (!__all_sync(ALL_LANES, is_finite))
        return (double)NAN;
    if (largest == 0)
        return 0;
    const double factor = rotated_factor(largest);
    for (uint64_t i = r.lane; i < d; i += WARP)
        a[i] = (float)(a[i] * factor);
    return factor;
}

// Writes the codes and t of the block with coefficients a / scale. Overwrites a.
__device__ static void encode_block(const struct rotated &r, uint8_t *code, uint64_t begin, float *a, uint64_t d, double scale)
{
    uint8_t *codes = rotated_codes(r, code, begin);
    float sum = squares(r, a, d), t;
    double factor = 1;
    if (!rotated_is_regular(sum)) {
        factor = normalize(r, a, d);
        sum = squares(r, a, d);
    }
    if (factor > 0) {
        const float levels = quantize(r, codes, a, d, sqrtf(sum / (float)d));
        t = rotated_scale((double)sum / levels / (scale * factor));
    } else {
        t = factor == 0 ? 0.0f : NAN;
        for (uint64_t i = r.lane; i < d / 16 * r.bits; i += WARP)
            ((uint16_t *)codes)[i] = 0;
    }
    if (r.lane == 0)
        rotated_scales(code)[begin / r.size] = t;
}

// The values as coefficients: a = H (signs a), with element i given by at(i).
template <class At> __device__ void forward(const struct rotated &r, float *a, uint64_t key, uint64_t begin, uint64_t d, At at)
{
    for (uint64_t pack = 0; pack < d; pack += ROTATED_PACK) {
        uint32_t flip[ROTATED_STEPS];
        pack_signs(r, key, begin + pack, flip);
        for (int k = 0; k < ROTATED_STEPS; k++) {
            const uint64_t i = pack + k * WARP + r.lane;
            a[i] = flipped(at(begin + i), flip[k]);
        }
    }
    transform(r, a, d);
}

// Transforms coefficients back, rounds each element to the type, and passes it to put(i, x). Overwrites a.
template <class T, class Put>
__device__ void inverse(const struct rotated &r, float *a, uint64_t key, uint64_t begin, uint64_t d, Put put)
{
    const double largest = T::largest;
    transform(r, a, d);
    for (uint64_t pack = 0; pack < d; pack += ROTATED_PACK) {
        uint32_t flip[ROTATED_STEPS];
        pack_signs(r, key, begin + pack, flip);
        for (int k = 0; k < ROTATED_STEPS; k++) {
            const uint64_t i = pack + k * WARP + r.lane;
            const float x = flipped(a[i], flip[k]);
            put(begin + i, rounded<T>((typename T::real)(x > largest ? largest : x < -largest ? -largest : x)));
        }
    }
}

// Passes every element of the block, rounded to the type, to put(i, x). With `adds`, skips a block of zeros.
template <class T, class Put>
__device__ void decode_block(const struct rotated &r, const uint8_t *code, uint64_t begin, uint64_t d, bool adds, Put put)
{
    const float t = rotated_scales(code)[begin / r.size];
    const bool is_bounded = rotated_is_bounded(t);
    if (t != 0 && is_bounded) {
        dequantize(r, r.values, rotated_codes(r, code, begin), d, t, false);
        inverse<T>(r, r.values, rotated_code_key(code), begin, d, put);
    } else if (!adds || !is_bounded) {
        for (uint64_t i = r.lane; i < d; i += WARP)
            put(begin + i, is_bounded ? (typename T::real)0 : (typename T::real)NAN);
    }
}

__device__ static bool are_alike(const struct rotated &r, const uint8_t *code, uint64_t rank_stride, uint64_t ranks)
{
    bool alike = true;
    for (uint64_t i = r.lane; i < ranks; i += WARP)
        alike &= rotated_code_key(code + i * rank_stride) == rotated_code_key(code);
    return __all_sync(ALL_LANES, alike);
}

// r.sum = factor times the sum over ranks: of coefficients if their codes are alike, otherwise of elements.
template <class T>
__device__ void sum_block(const struct rotated &r, const uint8_t *code, uint64_t rank_stride, uint64_t ranks, double factor,
                          bool alike, uint64_t begin, uint64_t d)
{
    for (uint64_t i = r.lane; i < d; i += WARP)
        r.sum[i] = 0;
    for (uint64_t rank = 0; rank < ranks; rank++, code += rank_stride) {
        const float t = rotated_scales(code)[begin / r.size];
        if (!alike)
            decode_block<T>(r, code, begin, d, true, [&](uint64_t i, typename T::real x) { r.sum[i - begin] += (float)x; });
        else if (t != 0 && rotated_is_bounded(t))
            dequantize(r, r.sum, rotated_codes(r, code, begin), d, t, true);
        for (uint64_t i = r.lane; i < d && alike && !rotated_is_bounded(t); i += WARP)
            r.sum[i] = NAN;
    }
    for (uint64_t i = r.lane; i < d && factor != 1; i += WARP)
        r.sum[i] *= (float)factor;
}

// Passes the elements of r.sum, coefficients of the code `like`, to put(i, x).
template <class T, class Put>
__device__ void invert_sum(const struct rotated &r, const uint8_t *like, uint64_t begin, uint64_t d, Put put)
{
    bool is_bounded = true, is_zero = true;
    for (uint64_t i = r.lane; i < d; i += WARP) {
        is_bounded &= rotated_is_bounded(r.sum[i]);
        is_zero &= r.sum[i] == 0;
    }
    is_bounded = __all_sync(ALL_LANES, is_bounded);
    is_zero = __all_sync(ALL_LANES, is_zero);
    if (is_bounded && !is_zero) {
        inverse<T>(r, r.sum, rotated_code_key(like), begin, d, put);
        return;
    }
    for (uint64_t i = r.lane; i < d; i += WARP)
        put(begin + i, is_zero ? (typename T::real)0 : (typename T::real)NAN);
}

// Calls each(begin, D) for all blocks of the warp.
template <class Each> __device__ void for_blocks(const struct rotated &r, Each each)
{
    for (uint64_t block = r.first; block * r.size < r.count; block += r.step)
        each(block * r.size, (uint64_t)rotated_block(r.count - block * r.size, r.size));
}

template <class T> __device__ void rotated_encode(const struct coded &coded, const void *src, uint64_t option, uint64_t seed)
{
    const struct rotated r = rotated_of(coded, option);
    const typename T::stored *from = (const typename T::stored *)src + coded.part.begin;
    for_blocks(r, [&](uint64_t begin, uint64_t d) {
        forward(r, r.values, seed, begin, d, [&](uint64_t i) { return i < r.count ? (float)T::load(from + i) : 0.0f; });
        encode_block(r, coded.code, begin, r.values, d, (double)d);
    });
    if (coded.first == 0 && r.count)
        *(uint64_t *)coded.code = seed;
}

// Runs afterwards, one block of threads per segment: writes the header except the key, which is there, and zeros up to the codes.
__device__ static void rotated_header(const struct coded &coded, uint64_t option)
{
    const uint64_t count = coded.part.count, size = option >> 8, blocks = count / size + (count % size != 0);
    float *scales = rotated_scales(coded.code);
    int found = 0;
    if (!count)
        return;
    for (uint64_t i = threadIdx.x; i < blocks; i += blockDim.x)
        found |= scales[i] != scales[i];
    const int nans = __syncthreads_or(found);
    if (threadIdx.x != 0)
        return;
    const uint64_t key = rotated_code_key(coded.code);
    codec_header_init(coded.code, ROTATED_VERSION, !nans);
    *(uint64_t *)coded.code = key;
    for (uint64_t i = blocks; i < rotated_scales_size(count, size) / sizeof(float); i++)
        scales[i] = 0;
}

template <class T> __device__ void rotated_decode(const struct coded &coded, void *dst, uint64_t option)
{
    const struct rotated r = rotated_of(coded, option);
    typename T::stored *to = (typename T::stored *)dst + coded.part.begin;
    for_blocks(r, [&](uint64_t begin, uint64_t d) {
        decode_block<T>(r, coded.code, begin, d, false, [&](uint64_t i, typename T::real x) {
            if (i < r.count)
                T::store(to + i, x);
        });
    });
}

template <class T> __device__ void rotated_decode_add(const struct coded &coded, float *dst, uint64_t option)
{
    const struct rotated r = rotated_of(coded, option);
    float *to = dst + coded.part.begin;
    for_blocks(r, [&](uint64_t begin, uint64_t d) {
        decode_block<T>(r, coded.code, begin, d, true, [&](uint64_t i, typename T::real x) {
            if (i >= r.count)
                return;
            const float total = (float)(to[i] + x);
            to[i] = canonical(total);
        });
    });
}

template <class T>
__device__ void rotated_decode_sum(const struct coded &coded, void *dst, uint64_t rank_stride, uint64_t ranks, double factor,
                                   uint64_t option)
{
    const struct rotated r = rotated_of(coded, option);
    typename T::stored *to = (typename T::stored *)dst + coded.part.begin;
    const bool alike = r.count && are_alike(r, coded.code, rank_stride, ranks);
    auto put = [&](uint64_t i, typename T::real x) {
        if (i < r.count)
            T::store(to + i, canonical(x));
    };
    for_blocks(r, [&](uint64_t begin, uint64_t d) {
        sum_block<T>(r, coded.code, rank_stride, ranks, factor, alike, begin, d);
        if (alike)
            invert_sum<T>(r, coded.code, begin, d, put);
        for (uint64_t i = r.lane; i < d && !alike; i += WARP)
            put(begin + i, (typename T::real)r.sum[i]);
    });
}

// Encodes factor times the sum over ranks, whose codes at src are rank_stride apart. rotated_header runs afterwards.
template <class T>
__device__ void rotated_reencode(const struct coded &to, const uint8_t *from, uint64_t rank_stride, uint64_t ranks, double factor,
                                 uint64_t option, uint64_t seed)
{
    const struct rotated r = rotated_of(to, option);
    const bool alike = r.count && are_alike(r, from, rank_stride, ranks);
    for_blocks(r, [&](uint64_t begin, uint64_t d) {
        sum_block<T>(r, from, rank_stride, ranks, factor, alike, begin, d);
        if (!alike)
            forward(r, r.sum, seed, begin, d, [&](uint64_t i) {
                return i < r.count ? (float)rounded<T>((typename T::real)r.sum[i - begin]) : 0.0f;
            });
        encode_block(r, to.code, begin, r.sum, d, alike ? 1.0 : (double)d);
    });
    if (to.first == 0 && r.count)
        *(uint64_t *)to.code = alike ? rotated_code_key(from) : seed;
}

// option: bits, and elements of a block times 256
#define ROTATED(type)                                                                                                 \
    KERNEL(rotated_encode_##type)(ENCODE_PARAMETERS)                                                                  \
    {                                                                                                                 \
        const struct coded coded = ENCODED;                                                                           \
        rotated_encode<type>(coded, src, option, segments_mix(seed, first + coded.part.begin));                       \
    }                                                                                                                 \
    KERNEL(rotated_header_##type)(ENCODE_PARAMETERS) { rotated_header(ENCODED, option); }                             \
    KERNEL(rotated_decode_##type)(DECODE_PARAMETERS(void)) { rotated_decode<type>(DECODED, dst, option); }            \
    KERNEL(rotated_decode_add_##type)(DECODE_PARAMETERS(float)) { rotated_decode_add<type>(DECODED, dst, option); }   \
    KERNEL(rotated_decode_sum_##type)(SUM_PARAMETERS)                                                                 \
    {                                                                                                                 \
        rotated_decode_sum<type>(SUMMED, dst, rank_stride, ranks, factor, option);                                    \
    }                                                                                                                 \
    KERNEL(rotated_reencode_##type)(SUM_PARAMETERS, uint64_t seed, uint64_t first)                                    \
    {                                                                                                                 \
        const struct coded from = SUMMED, to = coded_of(dst, 0, segment_stride, count, 1, segment, per_segment);      \
        rotated_reencode<type>(to, from.code, rank_stride, ranks, factor, option, segments_mix(seed, first + to.part.begin)); \
    }
EACH_TYPE(ROTATED)
