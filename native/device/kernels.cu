// GPU kernels, compiled for the installed GPU by NVRTC through CuPy, with -fmad=false. They use the headers of the C kernels, so
// the arithmetic and the results are bit-equal.
//
// Conventions, so that a launch needs no signature: every parameter is 8 bytes (pointer, uint64_t or double); grids and blocks are
// one-dimensional, blocks of whole warps, at most 256 threads; vectors are used if the addresses allow it. A GPU generates only one
// kind of NaN, while the CPU keeps the bits of an operand: canonical() is applied before a NaN can be stored.
#include "device/spans.h"
#include "kernel/codec.h"
#include "kernel/element.h"
#include "kernel/minmax_uint8.h"
#include "kernel/rotated.h"
#include "kernel/segments.h"
#include "kernel/sign.h"

#define KERNEL(name) extern "C" __global__ void __launch_bounds__(256) name

enum { BLOCK_MAX = 256, VECTOR = 4, WARP = 32 };

__device__ static uint64_t first_index() { return (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ static uint64_t all_threads() { return (uint64_t)gridDim.x * blockDim.x; }

// Replaces any NaN by NAN. Selects between integers: between floating point numbers the compiler may select before a conversion,
// and the GPU converts every NaN to its own kind.
__device__ static float canonical(float x) { return __int_as_float(x == x ? __float_as_int(x) : 0x7fc00000); }
__device__ static double canonical(double x)
{
    return __longlong_as_double(x == x ? __double_as_longlong(x) : 0x7ff8000000000000);
}

// One element type: its type in memory, the type to compute in, and its largest number. Accesses must be typed: through pointers of
// unknown type the compiler loads and stores single bytes.
struct f32 {
    typedef float stored, real;
    static constexpr double largest = 3.4028234663852886e+38;
    __device__ static real load(const stored *p) { return *p; }
    __device__ static void store(stored *p, real x) { *p = x; }
};
struct f64 {
    typedef double stored, real;
    static constexpr double largest = 1.7976931348623157e+308;
    __device__ static real load(const stored *p) { return *p; }
    __device__ static void store(stored *p, real x) { *p = x; }
};
struct f16 {
    typedef uint16_t stored;
    typedef float real;
    static constexpr double largest = 65504;
    __device__ static real load(const stored *p) { return float16_to_float(*p); }
    __device__ static void store(stored *p, real x) { *p = float16_from_float(x); }
};
struct bf16 {
    typedef uint16_t stored;
    typedef float real;
    static constexpr double largest = 3.3895313892515355e+38;
    __device__ static real load(const stored *p) { return bfloat16_to_float(*p); }
    __device__ static void store(stored *p, real x) { *p = bfloat16_from_float(x); }
};
struct u8 {                             // a code
    typedef uint8_t stored;
    __device__ static void store(stored *p, stored x) { *p = x; }
};

#define EACH_TYPE(of) of(f32) of(f64) of(f16) of(bf16)

// The arithmetic of a codec's header in `real`: codec_float_name or codec_double_name.
template <class real, class F, class D> __device__ constexpr auto in_real(F of_float, D of_double)
{
    if constexpr (sizeof(real) == sizeof(float))
        return of_float;
    else
        return of_double;
}
#define ARITHMETIC(codec, name) in_real<real>(codec##_float_##name, codec##_double_##name)

// VECTOR elements that are loaded and stored together.
template <class T> struct alignas(VECTOR * sizeof(T)) vector {
    T at[VECTOR];
};

// Accesses in the longest words possible, by intrinsics: otherwise the compiler accesses the elements one by one if there are
// branches, with each lane in another 32-byte sector.
template <int nbytes> struct word { typedef uint4 type; };
template <> struct word<8> { typedef uint2 type; };
template <> struct word<4> { typedef unsigned type; };

template <class T> __device__ vector<T> load_vector(const T *p)
{
    typedef typename word<sizeof(vector<T>)>::type word;
    vector<T> out;
    for (int i = 0; i < (int)(sizeof out / sizeof(word)); i++) {
        const word w = __ldcg((const word *)p + i);
        memcpy((char *)&out + i * sizeof w, &w, sizeof w);
    }
    return out;
}

template <class T> __device__ void store_vector(T *p, const vector<T> &in)
{
    typedef typename word<sizeof(vector<T>)>::type word;
    for (int i = 0; i < (int)(sizeof in / sizeof(word)); i++) {
        word w;
        memcpy(&w, (const char *)&in + i * sizeof w, sizeof w);
        __stcg((word *)p + i, w);
    }
}

template <class T> __device__ bool is_aligned(const void *p) { return (size_t)p % sizeof(vector<T>) == 0; }

// Calls each(i) for all elements i < count, or group(i) for groups of VECTOR consecutive ones.
template <class Each, class Group>
__device__ void for_elements(uint64_t count, bool vectors, Each each, Group group, uint64_t first, uint64_t step)
{
    const uint64_t groups = vectors ? count / VECTOR : 0;
    for (uint64_t g = first; g < groups; g += step)
        group(g * VECTOR);
    for (uint64_t i = groups * VECTOR + first; i < count; i += step)
        each(i);
}

// dst[i] = f(src[i]) for elements of types S and D. first, step: index of this thread, and number of threads.
template <class D, class S, class F>
__device__ void map(void *dst, const void *src, uint64_t count, F f, uint64_t first, uint64_t step)
{
    typename D::stored *to = (typename D::stored *)dst;
    const typename S::stored *from = (const typename S::stored *)src;
    for_elements(
        count, is_aligned<typename D::stored>(dst) && is_aligned<typename S::stored>(src),
        [&](uint64_t i) { D::store(to + i, f(S::load(from + i))); },
        [&](uint64_t i) {
            const vector<typename S::stored> in = load_vector(from + i);
            vector<typename D::stored> out;
            for (int k = 0; k < VECTOR; k++)
                D::store(&out.at[k], f(S::load(&in.at[k])));
            store_vector(to + i, out);
        },
        first, step);
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

// One block of threads per piece. Used for pack and unpack: hundreds of tensors in one launch.
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

// ------------------------------------------------------------------------------------------------------------- scale

// kernel.h: scale. f32, f16, bf16: the factor rounded to float32 first.
#define SCALE(type)                                                                             \
    KERNEL(scale_##type)(void *dst, const void *src, double factor, uint64_t count)             \
    {                                                                                           \
        const type::real by = (type::real)factor;                                               \
        map<type, type>(dst, src, count, [=](type::real x) { return x * by; }, first_index(), all_threads()); \
    }
EACH_TYPE(SCALE)

// -------------------------------------------------------------------------------------------------- error feedback

// x after a store and a load: rounded to the type.
template <class T> __device__ typename T::real rounded(typename T::real x)
{
    typename T::stored element;
    T::store(&element, x);
    return T::load(&element);
}

// encoder_encode (primitive/encoder.c), before and after the codec:
//     sum = residual + x    value = sum, rounded to the type    (value NULL: it is sum)
//     residual = residual - D(code), or 0 if that is not finite
#define FEEDBACK(type)                                                                                              \
    KERNEL(feed_residual_##type)(float *sum, void *value, const float *residual, const void *src, uint64_t count)   \
    {                                                                                                               \
        const type::stored *from = (const type::stored *)src;                                                       \
        for (uint64_t i = first_index(); i < count; i += all_threads()) {                                           \
            const float total = canonical(residual[i] + (float)type::load(from + i));                               \
            sum[i] = total;                                                                                         \
            if (value)                                                                                              \
                type::store((type::stored *)value + i, canonical((type::real)total));                               \
        }                                                                                                           \
    }                                                                                                               \
    KERNEL(update_residual_##type)(float *residual, const void *decoded, uint64_t count)                            \
    {                                                                                                               \
        const type::stored *from = (const type::stored *)decoded;                                                   \
        for (uint64_t i = first_index(); i < count; i += all_threads()) {                                           \
            const float difference = residual[i] - (float)type::load(from + i);                                     \
            residual[i] = difference - difference == 0 ? difference : 0.0f;                                         \
        }                                                                                                           \
    }
EACH_TYPE(FEEDBACK)

// -------------------------------------------------------------------------------------------------------- replicas

// d_lp_s.c: dst = w[0] values + (w[1] own + w[2] left + w[3] right), each product and sum rounded, those of replicas to float32. A
// replica with weight 0 is NULL; values are not read if w[0] is 0.
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
            type::store((type::stored *)dst + i, canonical(x));                                                     \
        }                                                                                                           \
    }
EACH_TYPE(MIX)

// --------------------------------------------------------------------------------------------------------- codecs

#include "device/kernels_codecs.cuh"
#include "device/kernels_rotated.cuh"
