// Macros for loops over elements of one type. The includer defines ISA, the suffix of all names, and ELEMENT, the type: f32, f16,
// bf16 or f64.
#pragma once

#include <float.h>

#include "kernel/element.h"
#include "kernel/functions.h"

#define LOAD JOIN(load, ELEMENT)
#define STORE JOIN(store, ELEMENT)
#define REAL JOIN(REAL, ELEMENT)            // the type to compute in
#define REAL_MAX JOIN(REAL_MAX, ELEMENT)    // its largest number
#define LARGEST JOIN(LARGEST, ELEMENT)      // the largest number of the element type
#define SIZE JOIN(SIZE, ELEMENT)            // bytes of an element

#define REAL_f32 float
#define REAL_f16 float
#define REAL_bf16 float
#define REAL_f64 double
#define REAL_MAX_f32 FLT_MAX
#define REAL_MAX_f16 FLT_MAX
#define REAL_MAX_bf16 FLT_MAX
#define REAL_MAX_f64 DBL_MAX
#define LARGEST_f32 FLT_MAX
#define LARGEST_f16 65504
#define LARGEST_bf16 0x1.fep127
#define LARGEST_f64 DBL_MAX
#define SIZE_f32 4
#define SIZE_f16 2
#define SIZE_bf16 2
#define SIZE_f64 8

// ARITHMETIC(codec, grid) is codec_float_grid or codec_double_grid.
#define ARITHMETIC__(codec, real, name) codec##_##real##_##name
#define ARITHMETIC_(codec, real, name) ARITHMETIC__(codec, real, name)
#define ARITHMETIC(codec, name) ARITHMETIC_(codec, REAL, name)
