// Codec ternary for AVX2.
#include <float.h>

#include "kernel/ternary.h"
#include "kernel/variants.h"
#include "kernel/vectors_avx2.h"

#include "kernel/ternary_vectors.h"
