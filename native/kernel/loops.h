// For loops that are written once and compiled for several instruction sets.
#pragma once

#include <stdint.h>

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
typedef uint16_t any_u16 ANY_ALIGNMENT;
typedef int16_t any_i16 ANY_ALIGNMENT;
typedef uint32_t any_u32 ANY_ALIGNMENT;
typedef int32_t any_i32 ANY_ALIGNMENT;
typedef uint64_t any_u64 ANY_ALIGNMENT;
typedef int64_t any_i64 ANY_ALIGNMENT;
typedef float any_f32 ANY_ALIGNMENT;
typedef double any_f64 ANY_ALIGNMENT;
