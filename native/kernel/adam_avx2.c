// Adam's arithmetic for AVX2, from the same loops.
#include "kernel/adam_loops.h"
#include "kernel/variants.h"

void adam_kernels_init_avx2(struct adam_kernels *kernels, bhvd_dtype flat) { *kernels = adam_kernels_avx2(flat); }
