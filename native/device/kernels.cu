// Kernels for the GPU: compiled for the one that is found, by NVRTC through CuPy, with -fmad=false. The arithmetic is that
// of the C kernels, from the same headers, and so are the bytes.
//
// Conventions, so that a launch needs no signature: every parameter is 8 bytes (pointer, uint64_t or double); grids and
// blocks are one-dimensional, blocks of at most 256 threads; vectors are used where the addresses allow it.
// A GPU makes NaNs of one kind, the CPU keeps the bits of an operand: where one may be stored, it is written as NAN.
//
// tests/device compiles this very file for the CPU too (emulation.h), hence no warp functions: threads of a block meet in
// __syncthreads() alone.
#include "device/spans.h"
#include "kernel/codec_random.h"
#include "kernel/codec_sums.h"
#include "kernel/element.h"
#include "kernel/half.h"
#include "kernel/minmax_uint8.h"
#include "kernel/qsgd.h"
#include "kernel/segments.h"
#include "kernel/sign.h"
#include "kernel/ternary.h"

#define KERNEL(name) extern "C" __global__ void __launch_bounds__(256) name

enum { BLOCK_MAX = 256, VECTOR = 4 };

__device__ static uint64_t first_index() { return (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ static uint64_t all_threads() { return (uint64_t)gridDim.x * blockDim.x; }

// One element type: how it lies in memory, and in which type it is computed with.
struct f32 {
    typedef float stored, real;
    __device__ static real load(const void *p) { return load_f32(p); }
    __device__ static void store(void *p, real x) { store_f32(p, x); }
};
struct f64 {
    typedef double stored, real;
    __device__ static real load(const void *p) { return load_f64(p); }
    __device__ static void store(void *p, real x) { store_f64(p, x); }
};
struct f16 {
    typedef uint16_t stored;
    typedef float real;
    __device__ static real load(const void *p) { return load_f16(p); }
    __device__ static void store(void *p, real x) { store_f16(p, x); }
};
struct bf16 {
    typedef uint16_t stored;
    typedef float real;
    __device__ static real load(const void *p) { return load_bf16(p); }
    __device__ static void store(void *p, real x) { store_bf16(p, x); }
};

// VECTOR elements that are loaded and stored at once.
template <class T> struct alignas(VECTOR * sizeof(T)) vector {
    T at[VECTOR];
};

template <class T> __device__ bool is_aligned(const void *p) { return (size_t)p % sizeof(vector<T>) == 0; }

// Calls each(i) for all elements i < count, in groups of VECTOR consecutive ones for which group(i) does the same.
template <class Each, class Group>
__device__ void for_elements(uint64_t count, bool vectors, Each each, Group group, uint64_t first, uint64_t step)
{
    const uint64_t groups = vectors ? count / VECTOR : 0;
    for (uint64_t g = first; g < groups; g += step)
        group(g * VECTOR);
    for (uint64_t i = groups * VECTOR + first; i < count; i += step)
        each(i);
}

// dst[i] = f(src[i]) for elements of types S and D.
template <class D, class S, class F>
__device__ void map(void *dst, const void *src, uint64_t count, F f)
{
    typename D::stored *to = (typename D::stored *)dst;
    const typename S::stored *from = (const typename S::stored *)src;
    for_elements(
        count, is_aligned<typename D::stored>(dst) && is_aligned<typename S::stored>(src),
        [&](uint64_t i) { D::store(to + i, f(S::load(from + i))); },
        [&](uint64_t i) {
            const vector<typename S::stored> in = *(const vector<typename S::stored> *)(from + i);
            vector<typename D::stored> out;
            for (int k = 0; k < VECTOR; k++)
                D::store(&out.at[k], f(S::load(&in.at[k])));
            *(vector<typename D::stored> *)(to + i) = out;
        },
        first_index(), all_threads());
}

// ------------------------------------------------------------------------------------------------------ fusion buffer

__device__ static const struct device_span *span_of_piece(const struct device_span *table, uint64_t count, uint64_t piece)
{
    uint64_t low = 0, high = count;     // the last span whose first piece is not past this one
    while (high - low > 1) {
        const uint64_t middle = (low + high) / 2;
        if (table[middle].first_piece <= piece)
            low = middle;
        else
            high = middle;
    }
    return &table[low];
}

struct alignas(16) sixteen {
    uint64_t halves[2];
};

// A block of threads for each piece. Pack and unpack are both this: hundreds of tensors in one launch.
KERNEL(copy_spans)(const struct device_span *table, uint64_t count)
{
    const struct device_span *span = span_of_piece(table, count, blockIdx.x);
    const uint64_t begin = (blockIdx.x - span->first_piece) * SPANS_PIECE;
    const uint64_t left = span->nbytes - begin, nbytes = left < SPANS_PIECE ? left : (uint64_t)SPANS_PIECE;
    const uint8_t *from = (const uint8_t *)span->src + begin;
    uint8_t *to = (uint8_t *)span->dst + begin;
    uint64_t done = 0;
    if (((size_t)from | (size_t)to) % 16 == 0) {
        done = nbytes / 16 * 16;
        for (uint64_t i = threadIdx.x; i < nbytes / 16; i += blockDim.x)
            ((struct sixteen *)to)[i] = ((const struct sixteen *)from)[i];
    } else if (((size_t)from | (size_t)to) % 4 == 0) {
        done = nbytes / 4 * 4;
        for (uint64_t i = threadIdx.x; i < nbytes / 4; i += blockDim.x)
            ((uint32_t *)to)[i] = ((const uint32_t *)from)[i];
    }
    for (uint64_t i = done + threadIdx.x; i < nbytes; i += blockDim.x)
        to[i] = from[i];
}

// ------------------------------------------------------------------------------------------------------- scale, cast

// kernel.h: scale. f32, f16, bf16: the factor rounded to float32 first.
#define SCALE(type)                                                                             \
    KERNEL(scale_##type)(void *dst, const void *src, double factor, uint64_t count)             \
    {                                                                                           \
        const type::real by = (type::real)factor;                                               \
        map<type, type>(dst, src, count, [=](type::real x) { return x * by; });                 \
    }
SCALE(f32)
SCALE(f64)
SCALE(f16)
SCALE(bf16)

// kernel.h: to_float, from_float, and the codecs float16 and bfloat16 of float32.
#define CAST(from, to)                                                                          \
    KERNEL(cast_##from##_##to)(void *dst, const void *src, uint64_t count)                      \
    {                                                                                           \
        map<to, from>(dst, src, count, [](from::real x) { return (to::real)x; });               \
    }
CAST(f16, f32)
CAST(bf16, f32)
CAST(f64, f32)
CAST(f32, f16)
CAST(f32, bf16)
CAST(f32, f64)

// -------------------------------------------------------------------------------------------------- error feedback

// As it is after a store: rounded to the type.
template <class T> __device__ typename T::real rounded(typename T::real x)
{
    typename T::stored element;
    T::store(&element, x);
    return T::load(&element);
}

// encoder_encode (primitive/encoder.c), before and after the codec:
//     sum = error + x    value = sum, rounded to the type    (value NULL: it is sum)
//     error = error - D(code), or 0 where that is not finite
#define FEEDBACK(type)                                                                                              \
    KERNEL(feed_error_##type)(float *sum, void *value, const float *error, const void *src, uint64_t count)         \
    {                                                                                                               \
        const type::stored *from = (const type::stored *)src;                                                       \
        for (uint64_t i = first_index(); i < count; i += all_threads()) {                                           \
            const float total = error[i] + (float)type::load(from + i);                                             \
            sum[i] = total == total ? total : NAN;                                                                  \
            if (value)                                                                                              \
                type::store((type::stored *)value + i, (type::real)sum[i]);                                         \
        }                                                                                                           \
    }                                                                                                               \
    KERNEL(update_residual_##type)(float *error, const void *decoded, uint64_t count)                                     \
    {                                                                                                               \
        const type::stored *from = (const type::stored *)decoded;                                                   \
        for (uint64_t i = first_index(); i < count; i += all_threads()) {                                           \
            const float lost = error[i] - (float)type::load(from + i);                                              \
            error[i] = lost - lost == 0 ? lost : 0.0f;                                                              \
        }                                                                                                           \
    }
FEEDBACK(f32)
FEEDBACK(f64)
FEEDBACK(f16)
FEEDBACK(bf16)

// -------------------------------------------------------------------------------------------------------- replicas

// d_lp_s.c: dst = w[0] values + (w[1] own + w[2] left + w[3] right), each product and sum rounded, those of replicas to
// float32. A replica whose weight is 0 is NULL; values are not read where w[0] is 0.
#define MIX(type)                                                                                                   \
    KERNEL(mix_##type)(void *dst, const void *values, const float *own, const float *left, const float *right,      \
                       double keep, double of_own, double of_left, double of_right, uint64_t count)                 \
    {                                                                                                               \
        const float *const replicas[] = {own, left, right};                                                         \
        const float weights[] = {(float)of_own, (float)of_left, (float)of_right};                                   \
        for (uint64_t i = first_index(); i < count; i += all_threads()) {                                           \
            float mixed = -0.0f;        /* changes no number that is added to it */                                 \
            for (int r = 0; r < 3; r++) {                                                                           \
                if (replicas[r])                                                                                    \
                    mixed = mixed + weights[r] * replicas[r][i];                                                    \
            }                                                                                                       \
            type::real x = mixed;                                                                                   \
            if (keep != 0)                                                                                          \
                x = type::load((const type::stored *)values + i) * (type::real)keep + x;                            \
            type::store((type::stored *)dst + i, x == x ? x : (type::real)NAN);                                     \
        }                                                                                                           \
    }
MIX(f32)
MIX(f64)
MIX(f16)
MIX(bf16)

// --------------------------------------------------------------------------------------------------------- codecs

#include "device/kernels_segments.cuh"
#include "device/kernels_minmax.cuh"
#include "device/kernels_bits.cuh"
#include "device/kernels_qsgd.cuh"

#define CODEC_KERNELS(codec)     \
    CODEC_DECODERS(codec, f32)   \
    CODEC_DECODERS(codec, f64)   \
    CODEC_DECODERS(codec, f16)   \
    CODEC_DECODERS(codec, bf16)
CODEC_KERNELS(minmax_uint8)
CODEC_KERNELS(sign)
CODEC_KERNELS(ternary)
CODEC_KERNELS(qsgd)

// ---------------------------------------------------------------------------------- arithmetic of algorithms, float32

// m = beta m + (1 - beta) g
KERNEL(momentum)(float *m, const float *g, double beta, double rest, uint64_t count)
{
    const float b = (float)beta, r = (float)rest;
    for (uint64_t i = first_index(); i < count; i += all_threads())
        m[i] = b * m[i] + r * g[i];
}

// dst = wa a + wb b
KERNEL(weighted_average)(float *dst, const float *a, const float *b, double wa, double wb, uint64_t count)
{
    const float p = (float)wa, q = (float)wb;
    for (uint64_t i = first_index(); i < count; i += all_threads())
        dst[i] = p * a[i] + q * b[i];
}

// x += mean - sent: what a round that ran in the background found, applied to weights that moved on meanwhile.
KERNEL(apply_delta)(float *x, const float *mean, const float *sent, uint64_t count)
{
    for (uint64_t i = first_index(); i < count; i += all_threads())
        x[i] += mean[i] - sent[i];
}
