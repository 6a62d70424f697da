// Prerequisites in C and in CUDA of arithmetic that both compile. NVRTC has no standard headers: build.py drops their include
// lines when it assembles the source, so the few names that are needed are declared here.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

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
#define CODEC_CONSTANT static __constant__ const
#else
#define CODEC_INLINE static inline
#define CODEC_CONSTANT static const
#endif
