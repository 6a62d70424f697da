// Codec minmax_uint8 for AVX-512: the vectors for minmax_uint8_vectors.h.
#include <float.h>

#include "kernel/minmax_uint8.h"
#include "kernel/variants.h"
#include "kernel/vectors_avx512.h"

#include "kernel/minmax_uint8_vectors.h"

void minmax_uint8_kernels_init_avx512(struct kernel_table *table)
{
    minmax_uint8_vectors_init_avx512(table);
}
