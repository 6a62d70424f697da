#include "base/pages.h"

#include <stdint.h>
#include <sys/mman.h>

void pages_prefer_huge(void *data, size_t nbytes)
{
    const uintptr_t begin = ((uintptr_t)data + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    const uintptr_t end = ((uintptr_t)data + nbytes) / HUGE_PAGE * HUGE_PAGE;
    if (begin < end)
        madvise((void *)begin, end - begin, MADV_HUGEPAGE);
}
