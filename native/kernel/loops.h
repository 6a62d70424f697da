// For files with the suffix _kernels, which build.py compiles as portable C, the definition, and once more for each instruction
// set: then VECTORS is defined, and ISA is the name of the instruction set.
#pragma once

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernel/element.h"
#include "kernel/kernel.h"

#ifdef ISA
#define VECTORS
#else
#define ISA scalar
#endif

// Tells the compiler that iterations are independent. They are: dst may equal a source, but not overlap it otherwise. (restrict
// would not allow equality; without either, in-place calls would run the unvectorized loop.)
#ifdef __clang__
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

// NAME(reduce) is reduce_avx2 if ISA is avx2.
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(name) JOIN(name, ISA)

#define INLINE static inline __attribute__((always_inline))

// Elements in memory of any alignment.
#define ANY_ALIGNMENT __attribute__((aligned(1), may_alias))
typedef uint8_t any_u8 ANY_ALIGNMENT;
typedef int8_t any_i8 ANY_ALIGNMENT;
typedef uint16_t any_u16 ANY_ALIGNMENT, any_f16 ANY_ALIGNMENT, any_bf16 ANY_ALIGNMENT;
typedef int16_t any_i16 ANY_ALIGNMENT;
typedef uint32_t any_u32 ANY_ALIGNMENT;
typedef int32_t any_i32 ANY_ALIGNMENT;
typedef uint64_t any_u64 ANY_ALIGNMENT;
typedef int64_t any_i64 ANY_ALIGNMENT;
typedef float any_f32 ANY_ALIGNMENT;
typedef double any_f64 ANY_ALIGNMENT;

// ------------------------------------------------------------------------------------------------------------- codecs

// The functions of a codec for each element type, <name>_encode_f32_<isa> and so on.
#define OPTIONS const struct bhvd_codec_options *options __attribute__((unused))
#define ENCODE(name, element) static void NAME(name##_encode_##element)(void *dst, const void *src, size_t count, OPTIONS)
#define DECODE(name, element) static void NAME(name##_decode_##element)(void *dst, const void *src, size_t count, OPTIONS)
#define DECODE_ADD(name, element) static void NAME(name##_decode_add_##element)(float *dst, const void *src, size_t count, OPTIONS)

// The types that have vectors, and all types.
#define EACH_VECTOR_TYPE(of, ...)             \
    of(BHVD_FLOAT32, f32, __VA_ARGS__)        \
    of(BHVD_FLOAT16, f16, __VA_ARGS__)        \
    of(BHVD_BFLOAT16, bf16, __VA_ARGS__)
#define EACH_FLOAT_TYPE(of, ...)              \
    EACH_VECTOR_TYPE(of, __VA_ARGS__)         \
    of(BHVD_FLOAT64, f64, __VA_ARGS__)
#ifdef VECTORS
#define EACH_TYPE EACH_VECTOR_TYPE
#else
#define EACH_TYPE EACH_FLOAT_TYPE
#endif

// Enters the functions of a codec with these names in `table`.
#define CODEC_SET(dtype, element, codec, number, size, encoder, decoder)                                            \
    table->codecs[codec][dtype].version = number;                                                                   \
    table->codecs[codec][dtype].encoded_size = size;                                                                \
    table->codecs[codec][dtype].encode = NAME(encoder##_encode_##element);                                          \
    table->codecs[codec][dtype].decode = NAME(decoder##_decode_##element);                                          \
    table->codecs[codec][dtype].decode_add = NAME(decoder##_decode_add_##element);

// -------------------------------------------------------------------------------------- codecs, one element at a time

// The types, and the type to compute in.
#define EACH_REAL(of) of(f32, float) of(f16, float) of(bf16, float) of(f64, double)

#define LARGEST_f32 FLT_MAX
#define LARGEST_f16 65504
#define LARGEST_bf16 0x1.fep127
#define LARGEST_f64 DBL_MAX

// The decoding of a codec. decoder: a struct with what all elements need, made from src, count and options; one(decoder, i):
// element i. It is rounded to the element type before it is added.
#define DECODE_LOOPS(name, element, type, decoder, one)                                                             \
    DECODE(name, element)                                                                                           \
    {                                                                                                               \
        const struct type d = decoder;                                                                              \
        for (size_t i = 0; i < count; i++)                                                                          \
            store_##element((char *)dst + sizeof(any_##element) * i, one(&d, i));                                   \
    }                                                                                                               \
    DECODE_ADD(name, element)                                                                                       \
    {                                                                                                               \
        const struct type d = decoder;                                                                              \
        for (size_t i = 0; i < count; i++) {                                                                        \
            char x[sizeof(any_##element)];                                                                          \
            store_##element(x, one(&d, i));                                                                         \
            store_f32((char *)dst + 4 * i, (float)(load_f32((char *)dst + 4 * i) + load_##element(x)));             \
        }                                                                                                           \
    }

// range_<element>: the minimum and maximum, never -0.0; both NaN if an element is not finite; 0 if there is none.
#define RANGE_LOOP(element, real)                                                                                   \
    INLINE void range_##element(const char *from, size_t count, real *least, real *greatest)                        \
    {                                                                                                               \
        real mn = count > 0 ? load_##element(from) : 0, mx = mn;                                                    \
        int is_finite = 1;                                                                                          \
        for (size_t i = 0; i < count; i++) {                                                                        \
            const real x = load_##element(from + sizeof(any_##element) * i);                                        \
            is_finite &= x >= (real)-LARGEST_##element && x <= (real)LARGEST_##element;                             \
            mn = x < mn ? x : mn;                                                                                   \
            mx = x > mx ? x : mx;                                                                                   \
        }                                                                                                           \
        *least = is_finite ? mn + 0 : (real)NAN;        /* + 0 turns -0.0 into +0.0 */                              \
        *greatest = is_finite ? mx + 0 : (real)NAN;                                                                 \
    }
