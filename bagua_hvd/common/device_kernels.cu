// Kernels for the GPU: compiled for the one that is found, by NVRTC through CuPy, with -fmad=false. The arithmetic is that
// of the C kernels, from the same headers, and so are the bytes.
//
// Conventions, so that a launch needs no signature: every parameter is 8 bytes (pointer, uint64_t or double); grids and
// blocks are one-dimensional, blocks of at most 256 threads; vectors are used where the addresses allow it.
// A GPU makes NaNs of one kind, the CPU keeps the bits of an operand: where one may be stored, it is written as NAN.
//
// tests/device compiles this very file for the CPU too (emulation.h), hence no warp functions: threads of a block meet in
// __syncthreads() alone.
// The table of a copy of many spans in one launch; shared with kernels.cu.
#ifndef BHVD_DEVICE_SPANS_H
#define BHVD_DEVICE_SPANS_H

// What C and CUDA each need before arithmetic that both compile. NVRTC has no standard headers: their lines are left out
// when the source for it is put together (build.py), so their few names stand here.
#ifndef BHVD_KERNEL_PROCESSOR_H
#define BHVD_KERNEL_PROCESSOR_H


#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)
#endif

#ifdef __CUDACC__
#define CODEC_INLINE static __host__ __device__ inline
#else
#define CODEC_INLINE static inline
#endif

#endif

enum {
    SPANS_PIECE = 16384,                // bytes that one block of threads copies
    SPANS_THREADS = 256
};

// nbytes from src to dst. Pieces are counted through all spans: this one's begin at number first_piece.
struct device_span {
    const void *src;
    void *dst;
    uint64_t nbytes, first_piece;
};

#endif
// The random numbers of the stochastic codecs: a function of (seed, index of the element in its chunk) and nothing
// else, so that order, vectors and threads do not matter. Plain C that a CUDA file includes as well.
//
//     z = seed + (1 + floor(i / 2^32)) 0x9e3779b97f4a7c15       mod 2^64, then the finalizer of splitmix64:
//     z = (z ^ z >> 30) 0xbf58476d1ce4e5b9;  z = (z ^ z >> 27) 0x94d049bb133111eb;  z = z ^ z >> 31
//     a = z mod 2^32;  b = floor(z / 2^32)
//     x = (i mod 2^32) ^ a                                      mod 2^32, from here on
//     x = (x ^ x >> 16) 0x21f0aaad;  x = (x ^ x >> 15 ^ b) 0x735a2d97;  x = x ^ x >> 15
//     u = ((x >> 8) | 1) / 2^24                                 odd multiples of 2^-24, in (0, 1), of mean 1/2
//
// Sources: splitmix64, Steele, Lea and Flood, OOPSLA 2014; the multipliers and shifts of the 32-bit mix were found by
// Ettinger and others (hash-prospector). Differs: b is mixed in half way, so that seeds are no shifts of one sequence.
// Not for secrets.
#ifndef BHVD_KERNEL_CODEC_RANDOM_H
#define BHVD_KERNEL_CODEC_RANDOM_H

// What the codecs share: the header of a code and its padding. Plain C that a CUDA file includes as well.
//
// Wire, one chunk: 32 bytes of header, then what the codec defines. A code is as many bytes as bhvd_encoded_size says,
// which both sides compute from codec, dtype, count and options. Numbers are little endian.
//     0..15: the codec's own, else 0    16: version    17: flags    18..31: the codec's own, else 0
// Codecs float16, bfloat16 and float32 have no header: their codes are the elements.
#ifndef BHVD_KERNEL_CODEC_H
#define BHVD_KERNEL_CODEC_H


enum {
    CODEC_HEADER = 32,                  // bytes
    CODEC_BLOCK = 32,                   // codes are padded with zeros to a multiple of this many bytes
    CODEC_VERSION_AT = 16,
    CODEC_FLAGS_AT = 17,
    CODEC_NONFINITE = 1                 // flag: the chunk holds a NaN or an infinity
};

CODEC_INLINE size_t codec_padded(size_t nbytes)
{
    return (nbytes + CODEC_BLOCK - 1) / CODEC_BLOCK * CODEC_BLOCK;
}

// Everything of the header but what is the codec's own, which the caller stores afterwards.
CODEC_INLINE void codec_header_init(uint8_t *header, uint8_t version, int is_finite)
{
    memset(header, 0, CODEC_HEADER);
    header[CODEC_VERSION_AT] = version;
    header[CODEC_FLAGS_AT] = is_finite ? 0 : CODEC_NONFINITE;
}

#endif

#define CODEC_RANDOM_MULTIPLIER_1 0x21f0aaadu
#define CODEC_RANDOM_MULTIPLIER_2 0x735a2d97u

// Serves the 2^32 elements from index on, which is a multiple of 2^32.
struct codec_key {
    uint32_t a, b;
};

CODEC_INLINE struct codec_key codec_key(uint64_t seed, uint64_t index)
{
    struct codec_key key;
    uint64_t z = seed + (1 + (index >> 32)) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    key.a = (uint32_t)z;
    key.b = (uint32_t)(z >> 32);
    return key;
}

CODEC_INLINE float codec_uniform(struct codec_key key, uint32_t index)
{
    uint32_t x = index ^ key.a;
    x = (x ^ x >> 16) * CODEC_RANDOM_MULTIPLIER_1;
    x = (x ^ x >> 15 ^ key.b) * CODEC_RANDOM_MULTIPLIER_2;
    x ^= x >> 15;
    return (float)(x >> 8 | 1) * 0x1p-24f;
}

#endif
// Sums whose order is defined, so that every processor gets the same bits: CODEC_SUMS partial sums in double, part j
// over the elements i = j mod CODEC_SUMS in rising order, then part j plus part j + w for w = 8, 4, 2, 1.
// A float32, float16 or bfloat16 is a double exactly, and so is its square: the sum is finite if and only if they all
// are.
#ifndef BHVD_KERNEL_CODEC_SUMS_H
#define BHVD_KERNEL_CODEC_SUMS_H


enum { CODEC_SUMS = 16 };

CODEC_INLINE double codec_sums_total(double parts[CODEC_SUMS])
{
    for (int w = CODEC_SUMS / 2; w > 0; w /= 2)
        for (int j = 0; j < w; j++)
            parts[j] += parts[j + w];
    return parts[0];
}

#endif
// One element of each floating point type: load from and store to memory of any alignment, as float32 (float64: as
// double). float16 and bfloat16 are integer bit arithmetic, exact, equal to F16C and to the AVX2 versions in avx2.h:
// round to nearest even, subnormals kept, a NaN keeps its sign and leading payload and becomes quiet when narrowed.
// Plain C that a CUDA file includes as well.
#ifndef BHVD_KERNEL_ELEMENT_H
#define BHVD_KERNEL_ELEMENT_H


// What may stand for a NaN in a result, so that its bits do not depend on the order of operands.
CODEC_INLINE float canonical_nan(float x)
{
    return x == x ? x : (float)NAN;
}

CODEC_INLINE float float_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

CODEC_INLINE uint32_t bits_from_float(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

CODEC_INLINE float float16_to_float(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff;
    if (magnitude > 0x7c00)                                     // NaN, made quiet
        return float_from_bits(sign | 0x7fc00000 | magnitude << 13);
    if (magnitude == 0x7c00)
        return float_from_bits(sign | 0x7f800000);
    if (magnitude >= 0x0400)                                    // normal: the exponent's bias grows from 15 to 127
        return float_from_bits(sign | ((magnitude << 13) + ((127 - 15) << 23)));
    const float subnormal = (float)magnitude * 0x1p-24f;        // exact
    return sign ? -subnormal : subnormal;
}

CODEC_INLINE uint16_t float16_from_float(float x)
{
    const uint32_t bits = bits_from_float(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)                                 // NaN
        return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x03ff));
    if (magnitude >= 0x477ff000)                                // from 65520 on, halfway past the largest: infinity
        return (uint16_t)(sign | 0x7c00);
    if (magnitude >= 0x38800000) {                              // normal; a carry out of the mantissa is right too
        const uint32_t narrow = magnitude - ((127 - 15) << 23);
        return (uint16_t)(sign | (narrow + 0x0fff + (narrow >> 13 & 1)) >> 13);
    }
    if (magnitude < 0x33000000)                                 // below 2^-25, half the smallest subnormal
        return (uint16_t)sign;
    const uint32_t shift = 126 - (magnitude >> 23);             // 14 .. 24 bits are dropped
    const uint32_t mantissa = (magnitude & 0x007fffff) | 0x00800000;
    const uint32_t kept = mantissa >> shift, dropped = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
    return (uint16_t)(sign | (kept + (dropped > half || (dropped == half && (kept & 1)))));
}

CODEC_INLINE float bfloat16_to_float(uint16_t h)
{
    return float_from_bits((uint32_t)h << 16);
}

CODEC_INLINE uint16_t bfloat16_from_float(float x)
{
    const uint32_t bits = bits_from_float(x);
    if (x != x)
        return (uint16_t)(bits >> 16 | 0x0040);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

CODEC_INLINE float load_f32(const void *p)
{
    float x;
    memcpy(&x, p, sizeof x);
    return x;
}

CODEC_INLINE void store_f32(void *p, float x)
{
    memcpy(p, &x, sizeof x);
}

CODEC_INLINE double load_f64(const void *p)
{
    double x;
    memcpy(&x, p, sizeof x);
    return x;
}

CODEC_INLINE void store_f64(void *p, double x)
{
    memcpy(p, &x, sizeof x);
}

CODEC_INLINE float load_f16(const void *p)
{
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return float16_to_float(h);
}

CODEC_INLINE void store_f16(void *p, float x)
{
    const uint16_t h = float16_from_float(x);
    memcpy(p, &h, sizeof h);
}

CODEC_INLINE float load_bf16(const void *p)
{
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return bfloat16_to_float(h);
}

CODEC_INLINE void store_bf16(void *p, float x)
{
    const uint16_t h = bfloat16_from_float(x);
    memcpy(p, &h, sizeof h);
}

#endif
// Codecs float16 and bfloat16: each element rounded to a 16-bit float, to nearest even. Too large a number becomes an
// infinity, infinities stay, a NaN stays one. A float64 is rounded once, not by way of float32.
//
// Wire: the elements, without a header; an empty chunk is no bytes.
#ifndef BHVD_KERNEL_HALF_H
#define BHVD_KERNEL_HALF_H


// x as float32, rounded to odd: cut off, and the last bit set if that lost anything. Rounding it again, to fewer bits,
// gives what rounding x gives.
CODEC_INLINE float half_odd_float(double x)
{
    const float nearest = (float)x;
    if (nearest != nearest || (double)nearest == x)
        return nearest;
    uint32_t bits = bits_from_float(nearest);
    bits -= fabs((double)nearest) > fabs(x);
    return float_from_bits(bits | 1);
}

CODEC_INLINE float load_odd_f64(const void *p)
{
    return half_odd_float(load_f64(p));
}

CODEC_INLINE void store_wide_f64(void *p, float x)
{
    store_f64(p, x);
}

#endif
// Codec minmax_uint8: each element as one of 256 levels between the chunk's minimum mn and maximum mx. The arithmetic,
// once for every processor: plain C that a CUDA file includes as well (there -fmad=false, as -ffp-contract=off here).
//
//     s = 255 / (mx - mn)    ub = rint(mx s)    lb = ub - 255
//     encode: q = min(max(rint(x s), lb), ub) - lb
//     decode: x' = min(max((q + lb) t, mn), mx)    t = (mx - mn) / 255
//
// The levels are whole multiples of t, so an exact 0 comes back as exactly 0 when mn <= 0 <= mx. rint rounds to nearest
// even. |x' - x| <= 0.5 / s plus rounding, a few units in the last place of x; the clamp to [mn, mx] only lessens it.
// real is float for float32, float16 and bfloat16, double for float64; s and t are computed in double, then rounded.
//
// Source: MinMaxUInt8 of BAGUA, Gan et al., arXiv:2107.01499. Differs:
// - Both sides are clamped: in a symmetric chunk rint(mx s) and rint(mn s) both round away from 0, and q would be -1.
// - No 1e-7 in the divisor, which erased chunks of small numbers. Instead s is bounded by 2^126 (double: 2^1022), so
//   that s and t are normal numbers.
// - mx == mn: all codes are 0 and decode to mn.
// - NaN or infinity in a chunk: mn and mx are stored as NaN, which makes it a constant chunk of NaN.
// - Decoding multiplies by t instead of dividing by s, and never leaves [mn, mx]: it cannot overflow.
// - Levels beyond 2^24 (offset data: mx/(mx - mn) large) are no longer all floats; lb is rounded then, and q is clamped
//   to 0..255 after the subtraction, which for smaller levels is the same as clamping to lb..ub before it.
//
// Wire (see codec.h): a header, then count codes of one byte, then zeros up to a multiple of 32 bytes.
//     0: mn, as an element    sizeof(element): mx
// mn and mx are never -0.0. An empty chunk is its header alone, with mn = mx = 0.
#ifndef BHVD_MINMAX_UINT8_H
#define BHVD_MINMAX_UINT8_H



enum { MINMAX_UINT8_VERSION = 2 };      // 1 is BAGUA's own formula

// What encode and decode need to know of a chunk that is not constant (mx > mn; test that first: NaN fails it).
//     real_grid         from mn and mx
//     real_quantize     q as a whole number in `real`
//     real_dequantize   x' from q, 0 <= q <= 255
#define MINMAX_UINT8_ARITHMETIC(real, rint_real, scale_max)                                           \
    struct minmax_uint8_##real##_grid {                                                               \
        real s, t, lb, mn, mx;                                                                        \
    };                                                                                                \
    CODEC_INLINE struct minmax_uint8_##real##_grid minmax_uint8_##real##_grid(real mn, real mx) \
    {                                                                                                 \
        /* half the range, because the range of doubles may overflow */                               \
        const double half = 0.5 * mx - 0.5 * mn;                                                      \
        struct minmax_uint8_##real##_grid grid;                                                       \
        if (half * (scale_max) > 127.5) {                                                             \
            grid.s = (real)(127.5 / half);                                                            \
            grid.t = (real)(half / 127.5);                                                            \
        } else {                                                                                      \
            grid.s = (real)(scale_max);                                                               \
            grid.t = (real)(1 / (scale_max));                                                         \
        }                                                                                             \
        grid.lb = rint_real(mx * grid.s) - (real)255;                                                 \
        grid.mn = mn;                                                                                 \
        grid.mx = mx;                                                                                 \
        return grid;                                                                                  \
    }                                                                                                 \
    CODEC_INLINE real minmax_uint8_##real##_quantize(const struct minmax_uint8_##real##_grid *grid, real x) \
    {                                                                                                 \
        const real q = rint_real(x * grid->s) - grid->lb;                                             \
        return q < 0 ? 0 : q > 255 ? 255 : q;                                                         \
    }                                                                                                 \
    CODEC_INLINE real minmax_uint8_##real##_dequantize(const struct minmax_uint8_##real##_grid *grid, real q) \
    {                                                                                                 \
        const real x = (q + grid->lb) * grid->t;                                                      \
        return x < grid->mn ? grid->mn : x > grid->mx ? grid->mx : x;                                 \
    }
MINMAX_UINT8_ARITHMETIC(float, rintf, 0x1p126)
MINMAX_UINT8_ARITHMETIC(double, rint, 0x1p1022)

#endif
// Codec qsgd: each element as one of 2 s + 1 levels between -n and n, at random so that the mean is the element.
//
//     n = ||x||_2 over a block of 512 elements        f = s / n
//     encode: q = sign(x) min(l + [u < |x| f - l], s),  l = floor(|x| f)        decode: x' = (q / s) n
//
// s is options.parameter, u is codec_uniform(seed, i) with i the index in the chunk, see codec_random.h: E x' = x
// within 2^-24 n / s. real is float for float32, float16 and bfloat16, double for float64; n is summed in double in the
// order of codec_sums.h; n and f are computed in double, then rounded to real; so is 1 / s, and x' = (q (1 / s)) n,
// never beyond n.
//
// Source: QSGD, Alistarh et al., arXiv:1610.02132. Differs:
// - n is at most the largest number of the element type, so that a level cannot overflow; and at least s 2^-126
//   (double: s 2^-1022) unless 0, so that f is a number. Any n >= max |x| keeps the mean.
// - The levels are bytes: no Elias coding.
// - NaN or infinity in a block, or a float64 sum beyond the largest double: n is NaN, the whole block decodes to NaN.
//   The others do not suffer.
//
// Wire (see codec.h): a header, then n for each block, float32 or float64, then zeros up to a multiple of 32 bytes,
// then q for each element, int8, then zeros up to a multiple of 32 bytes.
//     18: s
#ifndef BHVD_KERNEL_QSGD_H
#define BHVD_KERNEL_QSGD_H



enum {
    QSGD_VERSION = 1,
    QSGD_BLOCK = 512,                   // elements
    QSGD_LEVELS_AT = 18,
    QSGD_LEVELS_MAX = 127
};

// s, or 0 when the parameter is out of range.
CODEC_INLINE int qsgd_levels(double parameter)
{
    if (parameter == 0)
        return QSGD_LEVELS_MAX;
    return parameter >= 1 && parameter <= QSGD_LEVELS_MAX && parameter == (int)parameter ? (int)parameter : 0;
}

CODEC_INLINE size_t qsgd_norms_size(size_t count, size_t real_size)
{
    return codec_padded((count / QSGD_BLOCK + (count % QSGD_BLOCK != 0)) * real_size);
}

#define QSGD_ARITHMETIC(real, floor_real, scale_max)                                                \
    /* n from the sum of squares; largest: number of the element type */                            \
    CODEC_INLINE real qsgd_##real##_norm(double squares, int levels, double largest)                \
    {                                                                                               \
        const double n = sqrt(squares), smallest = levels / (scale_max);                            \
        if (!(squares < (double)INFINITY))                                                          \
            return (real)NAN;                                                                       \
        return (real)(n == 0 ? 0 : n < smallest ? smallest : n > largest ? largest : n);            \
    }                                                                                               \
    CODEC_INLINE real qsgd_##real##_scale(real norm, int levels)                                    \
    {                                                                                               \
        return norm > 0 ? (real)(levels / (double)norm) : 0;                                        \
    }                                                                                               \
    /* |q| */                                                                                       \
    CODEC_INLINE real qsgd_##real##_quantize(real magnitude, real scale, int levels, float u)       \
    {                                                                                               \
        const real r = magnitude * scale, l = floor_real(r), q = l + (u < r - l);                   \
        return q < levels ? q : levels;                                                             \
    }                                                                                               \
    CODEC_INLINE real qsgd_##real##_dequantize(real q, real step, real norm)                        \
    {                                                                                               \
        return q * step * norm;                                                                     \
    }
QSGD_ARITHMETIC(float, floorf, 0x1p126)
QSGD_ARITHMETIC(double, floor, 0x1p1022)

#endif

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
