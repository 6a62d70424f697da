// Codec minmax_uint8 for AVX2: the vectors for minmax_uint8_vectors.h; float64 by the compiler's vectors.
#include <float.h>

#include "kernel/minmax_uint8.h"
#include "kernel/variants.h"
#include "kernel/vectors_avx2.h"

#define ELEMENT f64
#define REAL double
#define REAL_MAX DBL_MAX
#define SIZE 8
#include "kernel/minmax_uint8_loops.h"

#include "kernel/minmax_uint8_vectors.h"

void minmax_uint8_kernels_init_avx2(struct kernel_table *table)
{
    minmax_uint8_vectors_init_avx2(table);
    kernel_codec_set(&table->codecs[BHVD_CODEC_MINMAX_UINT8][BHVD_FLOAT64], minmax_uint8_encode_f64_avx2,
                     minmax_uint8_decode_f64_avx2, minmax_uint8_decode_add_f64_avx2);
}
