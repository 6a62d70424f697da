// Kernels of the codecs that write bits: sign, sign_rms and ternary. Part of kernels.cu.
//
// A block of threads encodes one segment of `segment` elements (the last one: what is left): its code is at dst + s stride.
// error: NULL, or one float for each element, fed back as encoder_encode (primitive/encoder.c) does:
//     v = x + error, rounded to the type of x;   code = Q(v);   error = x + error - D(code), or 0 where that is not finite
#include "kernel/sign.h"
#include "kernel/ternary.h"

// As it is after a store: rounded to the type.
template <class T> __device__ typename T::real rounded(typename T::real x)
{
    typename T::stored element;
    T::store(&element, x);
    return T::load(&element);
}

// One segment's elements: what is encoded, and what is lost by it.
template <class T> struct feedback {
    const typename T::stored *src;
    float *error;                       // NULL: none
    uint64_t count;

    // Once for every element, before anything else.
    __device__ void add(uint64_t i) const
    {
        if (error)
            error[i] += (float)T::load(src + i);
    }
    __device__ typename T::real value(uint64_t i) const
    {
        return error ? rounded<T>((typename T::real)error[i]) : T::load(src + i);
    }
    __device__ void keep_lost(uint64_t i, typename T::real decoded) const
    {
        const float lost = error[i] - (float)rounded<T>(decoded);
        error[i] = lost - lost == 0 ? lost : 0.0f;
    }
};

template <class T>
__device__ struct feedback<T> feedback_of(const void *src, float *error, uint64_t count, uint64_t segment)
{
    const uint64_t begin = blockIdx.x * segment, left = count - begin;
    struct feedback<T> f = {(const typename T::stored *)src + begin, error ? error + begin : (float *)0,
                            left < segment ? left : segment};
    for (uint64_t i = threadIdx.x; i < f.count; i += blockDim.x)
        f.add(i);
    __syncthreads();
    return f;
}

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
template <class T>
__device__ void sign_encode(uint8_t *header, const struct feedback<T> &f, bool squares)
{
    typedef typename T::real real;
    __shared__ double parts[CODEC_SUMS];
    __shared__ real shared_scale;
    uint8_t *bits = header + CODEC_HEADER;
    const uint64_t bytes = sign_bits_size(f.count);
    for (uint64_t at = threadIdx.x; at < bytes; at += blockDim.x) {
        unsigned byte = 0;
        for (uint64_t i = 8 * at; i < 8 * at + 8 && i < f.count; i++)
            byte |= (unsigned)(f.value(i) < 0) << i % 8;
        bits[at] = (uint8_t)byte;
    }
    if (threadIdx.x < CODEC_SUMS) {
        double part = 0;
        for (uint64_t i = threadIdx.x; i < f.count; i += CODEC_SUMS) {
            const double magnitude = fabs((double)f.value(i));
            part += squares ? magnitude * magnitude : magnitude;
        }
        parts[threadIdx.x] = part;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const real found = (real)sign_scale(codec_sums_total(parts), f.count, squares);
        shared_scale = found == found ? found : (real)NAN;
        codec_header_init(header, SIGN_VERSION, found == found);
        store_scale(header, shared_scale);
    }
    __syncthreads();
    const real scale = shared_scale;
    if (scale != scale) {
        for (uint64_t at = threadIdx.x; at < bytes; at += blockDim.x)
            bits[at] = 0;
    }
    for (uint64_t i = threadIdx.x; i < f.count && f.error; i += blockDim.x)
        f.keep_lost(i, f.value(i) < 0 ? -scale : scale);
}

template <class T> __device__ typename T::real sign_element(const uint8_t *header, uint64_t i)
{
    const typename T::real scale = rounded<T>(load_scale<typename T::real>(header));
    const bool negative = header[CODEC_HEADER + i / 8] >> i % 8 & 1;
    return negative && scale == scale ? -scale : scale;
}

// ---------------------------------------------------------------------------------------------------------- ternary

__device__ static bool ternary_is_kept(float magnitude, float s, float u) { return ternary_float_is_kept(magnitude, s, u); }
__device__ static bool ternary_is_kept(double magnitude, double s, float u) { return ternary_double_is_kept(magnitude, s, u); }

template <class T>
__device__ void ternary_encode(uint8_t *header, const struct feedback<T> &f, uint64_t seed)
{
    typedef typename T::real real;
    __shared__ struct range<real> all[BLOCK_MAX];
    const real largest = largest_of((real)0);
    struct range<real> own = {0, 0, 1};
    for (uint64_t i = threadIdx.x; i < f.count; i += blockDim.x) {
        const real x = f.value(i), magnitude = x < 0 ? -x : x;
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
    const uint64_t blocks = ternary_blocks_size(f.count) / sizeof(struct ternary_block);
    for (uint64_t b = threadIdx.x; b < blocks; b += blockDim.x) {
        struct ternary_block block = {0, 0};
        for (uint64_t i = b * TERNARY_BLOCK; i < (b + 1) * TERNARY_BLOCK && i < f.count; i++) {
            const real x = f.value(i), magnitude = x < 0 ? -x : x;
            const float u = codec_uniform(codec_key(seed, i), (uint32_t)i);
            const bool kept = is_finite && ternary_is_kept(magnitude, s, u);
            block.kept |= (uint32_t)kept << i % TERNARY_BLOCK;
            block.negative |= (uint32_t)(kept && x < 0) << i % TERNARY_BLOCK;
            if (f.error)
                f.keep_lost(i, !is_finite ? s : !kept ? (real)0 : x < 0 ? -s : s);
        }
        ((struct ternary_block *)(header + CODEC_HEADER))[b] = block;
    }
}

template <class T> __device__ typename T::real ternary_element(const uint8_t *header, uint64_t i)
{
    typedef typename T::real real;
    const struct ternary_block *block = (const struct ternary_block *)(header + CODEC_HEADER) + i / TERNARY_BLOCK;
    const real s = rounded<T>(load_scale<real>(header));
    const real magnitude = block->kept >> i % TERNARY_BLOCK & 1 || s != s ? s : 0;
    return block->negative >> i % TERNARY_BLOCK & 1 && s == s ? -magnitude : magnitude;
}

// ----------------------------------------------------------------------------------------------------------- kernels

// seeds: one for each segment. decode_sum: one segment of `count` elements, of `ranks` codes at src + r stride.
#define BITS_KERNELS(type)                                                                                          \
    KERNEL(sign_encode_##type)(void *dst, uint64_t stride, const void *src, float *error, uint64_t count,           \
                               uint64_t segment, uint64_t squares)                                                  \
    {                                                                                                               \
        const struct feedback<type> f = feedback_of<type>(src, error, count, segment);                              \
        sign_encode<type>((uint8_t *)dst + blockIdx.x * stride, f, squares != 0);                                   \
    }                                                                                                               \
    KERNEL(ternary_encode_##type)(void *dst, uint64_t stride, const void *src, float *error, uint64_t count,        \
                                  uint64_t segment, const uint64_t *seeds)                                          \
    {                                                                                                               \
        const struct feedback<type> f = feedback_of<type>(src, error, count, segment);                              \
        ternary_encode<type>((uint8_t *)dst + blockIdx.x * stride, f, seeds[blockIdx.x]);                           \
    }                                                                                                               \
    BITS_DECODE(sign, type)                                                                                         \
    BITS_DECODE(ternary, type)
#define BITS_DECODE(codec, type)                                                                                    \
    KERNEL(codec##_decode_##type)(void *dst, const void *src, uint64_t stride, uint64_t count, uint64_t segment)    \
    {                                                                                                               \
        for (uint64_t i = first_index(); i < count; i += all_threads())                                             \
            type::store((type::stored *)dst + i,                                                                    \
                        codec##_element<type>((const uint8_t *)src + i / segment * stride, i % segment));           \
    }                                                                                                               \
    KERNEL(codec##_decode_sum_##type)(float *dst, const void *src, uint64_t stride, uint64_t ranks, uint64_t count) \
    {                                                                                                               \
        for (uint64_t i = first_index(); i < count; i += all_threads()) {                                           \
            float sum = 0;                                                                                          \
            for (uint64_t r = 0; r < ranks; r++)                                                                    \
                sum = (float)(sum + codec##_element<type>((const uint8_t *)src + r * stride, i));                   \
            dst[i] = sum == sum ? sum : NAN;                                                                        \
        }                                                                                                           \
    }
BITS_KERNELS(f32)
BITS_KERNELS(f64)
BITS_KERNELS(f16)
BITS_KERNELS(bf16)
