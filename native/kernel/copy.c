// Copies of results so long that they are not in the caches when they are used.
#include <string.h>

#include "kernel/kernel.h"
#include "kernel/variants.h"

static void long_copy_scalar(void *dst, const void *src, size_t nbytes)
{
    if (nbytes)
        memcpy(dst, src, nbytes);
}

void copy_kernels_init(struct kernel_table *table, unsigned cpu)
{
    table->long_copy = long_copy_scalar;
    if (cpu & CPU_AVX2)
        copy_kernels_init_avx2(table, cpu);
}
