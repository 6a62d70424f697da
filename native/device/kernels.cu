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

// ------------------------------------------------------------------------------------------------ codec minmax_uint8

// Chunks as bhvd_chunk_count cuts them: the first count % chunks are one longer.
struct chunk {
    uint64_t begin, count;
};

__device__ static struct chunk chunk_at(uint64_t count, uint64_t chunks, uint64_t k)
{
    const uint64_t each = count / chunks, longer = count % chunks;
    struct chunk chunk = {k * each + (k < longer ? k : longer), each + (k < longer)};
    return chunk;
}

template <class real> struct range {
    real mn, mx;
    int is_finite;
};

template <class real> __device__ void merge(struct range<real> *into, const struct range<real> *other)
{
    into->is_finite &= other->is_finite;
    into->mn = other->mn < into->mn ? other->mn : into->mn;
    into->mx = other->mx > into->mx ? other->mx : into->mx;
}

// Leaves in all[0] the range of all threads' own ones.
template <class real> __device__ void merge_block(struct range<real> *all, struct range<real> own)
{
    all[threadIdx.x] = own;
    __syncthreads();
    for (unsigned half = BLOCK_MAX / 2; half > 0; half /= 2) {
        if (threadIdx.x < half && threadIdx.x + half < blockDim.x)
            merge(&all[threadIdx.x], &all[threadIdx.x + half]);
        __syncthreads();
    }
}

template <class real> __device__ struct range<real> range_of(real x, real largest)
{
    struct range<real> range = {x, x, x >= -largest && x <= largest};
    return range;
}

__device__ static float largest_of(float) { return 3.402823466e+38f; }
__device__ static double largest_of(double) { return 1.7976931348623157e+308; }

// First pass: `per_chunk` blocks of threads for each chunk, each of which writes its range.
template <class T>
__device__ void minmax_ranges(struct range<typename T::real> *ranges, const void *src, uint64_t count, uint64_t chunks,
                              uint64_t per_chunk)
{
    typedef typename T::real real;
    typedef typename T::stored stored;
    __shared__ struct range<real> all[BLOCK_MAX];
    const struct chunk chunk = chunk_at(count, chunks, blockIdx.x / per_chunk);
    const stored *from = (const stored *)src + chunk.begin;
    const real largest = largest_of((real)0);
    struct range<real> own = range_of(chunk.count ? T::load(from) : (real)0, largest);
    auto take = [&](real x) {
        const struct range<real> one = range_of(x, largest);
        merge(&own, &one);
    };
    for_elements(
        chunk.count, is_aligned<stored>(from), [&](uint64_t i) { take(T::load(from + i)); },
        [&](uint64_t i) {
            const vector<stored> in = *(const vector<stored> *)(from + i);
            for (int k = 0; k < VECTOR; k++)
                take(T::load(&in.at[k]));
        },
        blockIdx.x % per_chunk * blockDim.x + threadIdx.x, per_chunk * blockDim.x);
    merge_block(all, own);
    if (threadIdx.x == 0)
        ranges[blockIdx.x] = all[0];
}

// Second pass, the same grid: the code of chunk k at dst + k stride.
#define MINMAX_ENCODE(type, real)                                                                                   \
    KERNEL(minmax_uint8_ranges_##type)(void *ranges, const void *src, uint64_t count, uint64_t chunks,              \
                                       uint64_t per_chunk)                                                          \
    {                                                                                                               \
        minmax_ranges<type>((struct range<real> *)ranges, src, count, chunks, per_chunk);                           \
    }                                                                                                               \
    KERNEL(minmax_uint8_encode_##type)(void *dst, uint64_t stride, const void *src, const void *ranges,             \
                                       uint64_t count, uint64_t chunks, uint64_t per_chunk)                         \
    {                                                                                                               \
        __shared__ struct range<real> all[BLOCK_MAX];                                                               \
        const uint64_t k = blockIdx.x / per_chunk, part = blockIdx.x % per_chunk;                                   \
        const struct chunk chunk = chunk_at(count, chunks, k);                                                      \
        const type::stored *from = (const type::stored *)src + chunk.begin;                                         \
        const struct range<real> *mine = (const struct range<real> *)ranges + k * per_chunk;                        \
        struct range<real> own = mine[0];                                                                           \
        for (uint64_t i = threadIdx.x; i < per_chunk; i += blockDim.x)                                              \
            merge(&own, &mine[i]);                                                                                  \
        merge_block(all, own);                                                                                      \
        const real mn = all[0].is_finite ? all[0].mn + 0 : (real)NAN, mx = all[0].is_finite ? all[0].mx + 0 : (real)NAN; \
        uint8_t *header = (uint8_t *)dst + k * stride, *codes = header + CODEC_HEADER;                              \
        const bool constant = !(mx > mn);                                                                           \
        struct minmax_uint8_##real##_grid grid;                                                                     \
        if (!constant)                                                                                              \
            grid = minmax_uint8_##real##_grid(mn, mx);                                                              \
        auto code = [&](real x) {                                                                                   \
            return constant ? (uint8_t)0 : (uint8_t)(int)minmax_uint8_##real##_quantize(&grid, x);                  \
        };                                                                                                          \
        for_elements(                                                                                               \
            chunk.count, is_aligned<type::stored>(from) && is_aligned<uint8_t>(codes),                              \
            [&](uint64_t i) { codes[i] = code(type::load(from + i)); },                                             \
            [&](uint64_t i) {                                                                                       \
                const vector<type::stored> in = *(const vector<type::stored> *)(from + i);                          \
                vector<uint8_t> out;                                                                                \
                for (int j = 0; j < VECTOR; j++)                                                                    \
                    out.at[j] = code(type::load(&in.at[j]));                                                        \
                *(vector<uint8_t> *)(codes + i) = out;                                                              \
            },                                                                                                      \
            part * blockDim.x + threadIdx.x, per_chunk * blockDim.x);                                               \
        if (part == 0 && threadIdx.x == 0) {                                                                        \
            codec_header_init(header, MINMAX_UINT8_VERSION, all[0].is_finite);                                      \
            type::store(header, mn);                                                                                \
            type::store(header + sizeof(type::stored), mx);                                                         \
            for (uint64_t i = chunk.count; i < codec_padded(chunk.count); i++)                                      \
                codes[i] = 0;                                                                                       \
        }                                                                                                           \
    }                                                                                                               \
    /* One chunk of `count` elements, from each of `ranks` codes at src + r stride: dst = their sum, in float32. */ \
    KERNEL(minmax_uint8_decode_sum_##type)(float *dst, const void *src, uint64_t stride, uint64_t ranks, uint64_t count) \
    {                                                                                                               \
        auto sum = [&](uint64_t i, int n, float *out) {                                                             \
            for (int j = 0; j < n; j++)                                                                             \
                out[j] = 0;                                                                                         \
            for (uint64_t r = 0; r < ranks; r++) {                                                                  \
                const uint8_t *header = (const uint8_t *)src + r * stride, *codes = header + CODEC_HEADER;          \
                const real mn = type::load(header), mx = type::load(header + sizeof(type::stored));                 \
                struct minmax_uint8_##real##_grid grid;                                                             \
                if (mx > mn)                                                                                        \
                    grid = minmax_uint8_##real##_grid(mn, mx);                                                      \
                for (int j = 0; j < n; j++) {                                                                       \
                    type::stored element;                                                                           \
                    type::store(&element, mx > mn ? minmax_uint8_##real##_dequantize(&grid, codes[i + j]) : mn);    \
                    const float total = (float)(out[j] + type::load(&element));                                     \
                    out[j] = total == total ? total : NAN;                                                          \
                }                                                                                                   \
            }                                                                                                       \
        };                                                                                                          \
        for_elements(                                                                                               \
            count, is_aligned<float>(dst), [&](uint64_t i) { sum(i, 1, dst + i); },                                 \
            [&](uint64_t i) {                                                                                       \
                vector<float> out;                                                                                  \
                sum(i, VECTOR, out.at);                                                                             \
                *(vector<float> *)(dst + i) = out;                                                                  \
            },                                                                                                      \
            first_index(), all_threads());                                                                          \
    }                                                                                                               \
    KERNEL(minmax_uint8_decode_##type)(void *dst, const void *src, uint64_t count)                                  \
    {                                                                                                               \
        const uint8_t *header = (const uint8_t *)src, *codes = header + CODEC_HEADER;                               \
        const real mn = type::load(header), mx = type::load(header + sizeof(type::stored));                         \
        type::stored *to = (type::stored *)dst;                                                                     \
        struct minmax_uint8_##real##_grid grid;                                                                     \
        const bool constant = !(mx > mn);                                                                           \
        if (!constant)                                                                                              \
            grid = minmax_uint8_##real##_grid(mn, mx);                                                              \
        auto value = [&](uint8_t q) { return constant ? mn : minmax_uint8_##real##_dequantize(&grid, q); };         \
        for_elements(                                                                                               \
            count, is_aligned<type::stored>(dst) && is_aligned<uint8_t>(codes),                                     \
            [&](uint64_t i) { type::store(to + i, value(codes[i])); },                                              \
            [&](uint64_t i) {                                                                                       \
                const vector<uint8_t> in = *(const vector<uint8_t> *)(codes + i);                                   \
                vector<type::stored> out;                                                                           \
                for (int j = 0; j < VECTOR; j++)                                                                    \
                    type::store(&out.at[j], value(in.at[j]));                                                       \
                *(vector<type::stored> *)(to + i) = out;                                                            \
            },                                                                                                      \
            first_index(), all_threads());                                                                          \
    }
MINMAX_ENCODE(f32, float)
MINMAX_ENCODE(f64, double)
MINMAX_ENCODE(f16, float)
MINMAX_ENCODE(bf16, float)

// -------------------------------------------------------------------------------------------------------- codec qsgd

// A block of threads for each QSGD_BLOCK elements, float32. The first 16 threads sum in the order of codec_sums.h.
KERNEL(qsgd_encode_f32)(void *dst, const float *src, uint64_t count, uint64_t levels, uint64_t seed)
{
    __shared__ double parts[CODEC_SUMS];
    __shared__ float norm;
    const uint64_t begin = (uint64_t)blockIdx.x * QSGD_BLOCK, left = count - begin;
    const uint64_t n = left < QSGD_BLOCK ? left : (uint64_t)QSGD_BLOCK, norms_size = qsgd_norms_size(count, sizeof(float));
    uint8_t *header = (uint8_t *)dst;
    float *norms = (float *)(header + CODEC_HEADER);
    int8_t *codes = (int8_t *)(header + CODEC_HEADER + norms_size);
    if (threadIdx.x < CODEC_SUMS) {
        double part = 0;
        for (uint64_t i = threadIdx.x; i < n; i += CODEC_SUMS) {
            const double x = src[begin + i];
            part += x * x;
        }
        parts[threadIdx.x] = part;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const float found = qsgd_float_norm(codec_sums_total(parts), (int)levels, 3.402823466e+38);
        norm = found == found ? found : NAN;
        norms[blockIdx.x] = norm;
    }
    __syncthreads();
    const float scale = qsgd_float_scale(norm, (int)levels);
    for (uint64_t i = threadIdx.x; i < n; i += blockDim.x) {
        const uint64_t at = begin + i;
        const float x = src[at];
        const float u = codec_uniform(codec_key(seed, at), (uint32_t)at);
        const int q = norm == norm ? (int)qsgd_float_quantize(fabsf(x), scale, (int)levels, u) : 0;
        codes[at] = (int8_t)(x < 0 ? -q : q);
    }
}

// Afterwards, one block of threads: the header, and zeros up to the ends of norms and codes.
KERNEL(qsgd_header_f32)(void *dst, uint64_t count, uint64_t levels)
{
    __shared__ int nans;
    const uint64_t blocks = count / QSGD_BLOCK + (count % QSGD_BLOCK != 0);
    const uint64_t norms_size = qsgd_norms_size(count, sizeof(float));
    uint8_t *header = (uint8_t *)dst;
    float *norms = (float *)(header + CODEC_HEADER);
    uint8_t *codes = header + CODEC_HEADER + norms_size;
    if (threadIdx.x == 0)
        nans = 0;
    __syncthreads();
    for (uint64_t i = threadIdx.x; i < blocks; i += blockDim.x) {
        if (norms[i] != norms[i])
            nans = 1;                   // by whomever: all write the same
    }
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    codec_header_init(header, QSGD_VERSION, !nans);
    header[QSGD_LEVELS_AT] = (uint8_t)levels;
    for (uint64_t i = blocks; i < norms_size / sizeof(float); i++)
        norms[i] = 0;
    for (uint64_t i = count; i < codec_padded(count); i++)
        codes[i] = 0;
}

KERNEL(qsgd_decode_f32)(float *dst, const void *src, uint64_t count)
{
    const uint8_t *header = (const uint8_t *)src;
    const float *norms = (const float *)(header + CODEC_HEADER);
    const int8_t *codes = (const int8_t *)(header + CODEC_HEADER + qsgd_norms_size(count, sizeof(float)));
    const float step = 1 / (float)header[QSGD_LEVELS_AT];
    for (uint64_t i = first_index(); i < count; i += all_threads()) {
        const float x = qsgd_float_dequantize(codes[i], step, norms[i / QSGD_BLOCK]);
        dst[i] = x == x ? x : NAN;
    }
}

#include "device/kernels_bits.cuh"

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
