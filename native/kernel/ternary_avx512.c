// Codec ternary for AVX-512.
#include <float.h>

#include "kernel/ternary.h"
#include "kernel/variants.h"
#include "kernel/vectors_avx512.h"

#include "kernel/ternary_vectors.h"
