// Includes LOOPS, a codec's loops over one element at a time, for each element type as the scalar definitions:
//     ISA       scalar
//     ELEMENT   f32, f16, bf16, f64: load_<ELEMENT> and store_<ELEMENT>
//     REAL      float or double, in which to compute
//     REAL_MAX  its largest number
//     LARGEST   the largest number of the element type
//     SIZE      bytes of an element
#include <float.h>

#include "kernel/definitions.h"
#include "kernel/element.h"
#include "kernel/loops.h"

#define ISA scalar

#define ELEMENT f32
#define REAL float
#define REAL_MAX FLT_MAX
#define LARGEST FLT_MAX
#define SIZE 4
#include LOOPS
#undef ELEMENT
#undef REAL
#undef REAL_MAX
#undef LARGEST
#undef SIZE

#define ELEMENT f16
#define REAL float
#define REAL_MAX FLT_MAX
#define LARGEST 65504
#define SIZE 2
#include LOOPS
#undef ELEMENT
#undef REAL
#undef REAL_MAX
#undef LARGEST
#undef SIZE

#define ELEMENT bf16
#define REAL float
#define REAL_MAX FLT_MAX
#define LARGEST 0x1.fep127
#define SIZE 2
#include LOOPS
#undef ELEMENT
#undef REAL
#undef REAL_MAX
#undef LARGEST
#undef SIZE

#define ELEMENT f64
#define REAL double
#define REAL_MAX DBL_MAX
#define LARGEST DBL_MAX
#define SIZE 8
#include LOOPS
#undef ELEMENT
#undef REAL
#undef REAL_MAX
#undef LARGEST
#undef SIZE
