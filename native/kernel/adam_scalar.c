// Adam's arithmetic: the definitions.
#define ISA scalar
#include "kernel/adam_loops.h"

#include "kernel/variants.h"

void adam_kernels_init(struct adam_kernels *kernels, bhvd_dtype flat, unsigned cpu)
{
    *kernels = adam_kernels_scalar(flat);
    if (cpu & CPU_AVX2)
        adam_kernels_init_avx2(kernels, flat);
}
