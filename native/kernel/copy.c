// Copies past the caches: for results so large that they would only drive out what is needed next. A line that is
// written whole this way need not be read first.
#include <string.h>

#include "kernel/kernel.h"
#include "kernel/variants.h"

static void stream_copy_scalar(void *dst, const void *src, size_t nbytes)
{
    if (nbytes)
        memcpy(dst, src, nbytes);
}

void copy_kernels_init(struct kernel_table *table, unsigned cpu)
{
    table->stream_copy = stream_copy_scalar;
    if (cpu & CPU_AVX2)
        copy_kernels_init_avx2(table);
}
