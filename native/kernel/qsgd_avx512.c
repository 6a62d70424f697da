// Codec qsgd for AVX-512.
#include <float.h>

#include "kernel/qsgd.h"
#include "kernel/variants.h"
#include "kernel/vectors_avx512.h"

#include "kernel/qsgd_vectors.h"
