// Includes LOOPS, a codec's loops over one element at a time (of_element.h), once for each element type, as scalar definitions.
#include "kernel/of_element.h"

#define ISA scalar

#define ELEMENT f32
#include LOOPS
#undef ELEMENT
#define ELEMENT f16
#include LOOPS
#undef ELEMENT
#define ELEMENT bf16
#include LOOPS
#undef ELEMENT
#define ELEMENT f64
#include LOOPS
#undef ELEMENT
