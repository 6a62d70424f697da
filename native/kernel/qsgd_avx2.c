// Codec qsgd for AVX2.
#include <float.h>

#include "kernel/qsgd.h"
#include "kernel/variants.h"
#include "kernel/vectors_avx2.h"

#include "kernel/qsgd_vectors.h"
