// Copies past the caches, by non-temporal stores of AVX2.
#include <immintrin.h>
#include <string.h>

#include "kernel/kernel.h"
#include "kernel/variants.h"

enum { VECTOR = 32, LINE = 64 };

static void stream_copy_avx2(void *dst, const void *src, size_t nbytes)
{
    char *to = dst;
    const char *from = src;
    size_t head = -(uintptr_t)to % LINE;
    head = head < nbytes ? head : nbytes;
    const size_t lines = (nbytes - head) / LINE * LINE, tail = nbytes - head - lines;
    if (head)
        memcpy(to, from, head);
    to += head;
    from += head;
    for (size_t i = 0; i < lines; i += LINE) {
        const __m256i a = _mm256_loadu_si256((const __m256i *)(from + i));
        const __m256i b = _mm256_loadu_si256((const __m256i *)(from + i + VECTOR));
        _mm256_stream_si256((__m256i *)(to + i), a);
        _mm256_stream_si256((__m256i *)(to + i + VECTOR), b);
    }
    _mm_sfence();       // what is stored next says that the copy is there
    if (tail)
        memcpy(to + lines, from + lines, tail);
}

void copy_kernels_init_avx2(struct kernel_table *table) { table->stream_copy = stream_copy_avx2; }
