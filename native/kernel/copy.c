// Copies of what is not in this core's caches when it is used: of results that are long, or that another core reads.
#include <string.h>

#include "kernel/kernel.h"
#include "kernel/variants.h"

static void copy_scalar(void *dst, const void *src, size_t nbytes)
{
    if (nbytes)
        memcpy(dst, src, nbytes);
}

void copy_kernels_init(struct kernel_table *table, unsigned cpu)
{
    table->long_copy = copy_scalar;
    table->streamed_copy = NULL;
    if (cpu & CPU_AVX2)
        copy_kernels_init_avx2(table, cpu);
}
