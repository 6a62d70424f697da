// Copies of data that is not in this core's caches when it is used: long results, or data that another core reads.
//
// With vectors, whole cache lines at a time. Streamed copies use non-temporal stores, which bypass the caches: a line written
// as a whole need not be read first, nor taken from another core's cache. On Intel's servers such stores are slow, a core waits for
// each line; there four pages are copied side by side, so that as many prefetchers run ahead.
#include "kernel/loops.h"

#ifdef VECTORS
#include <immintrin.h>

enum { VECTOR = 32, LINE = 64, PAGE = 4096, PAGES = 4 };

// nbytes: a multiple of LINE.
typedef void (*copy_lines_fn)(char *dst, const char *src, size_t nbytes);

static void stream_lines(char *dst, const char *src, size_t nbytes)
{
    for (size_t i = 0; i < nbytes; i += LINE) {
        const __m256i a = _mm256_loadu_si256((const __m256i *)(src + i));
        const __m256i b = _mm256_loadu_si256((const __m256i *)(src + i + VECTOR));
        _mm256_stream_si256((__m256i *)(dst + i), a);
        _mm256_stream_si256((__m256i *)(dst + i + VECTOR), b);
    }
    _mm_sfence();       // before a later store announces that the copy is complete
}

static void copy_pages(char *dst, const char *src, size_t nbytes)
{
    size_t begin = 0;
    for (; begin + PAGES * PAGE <= nbytes; begin += PAGES * PAGE) {
        for (size_t line = begin; line < begin + PAGE; line += LINE) {
            for (size_t i = line; i < line + PAGES * PAGE; i += PAGE) {
                const __m256i a = _mm256_loadu_si256((const __m256i *)(src + i));
                const __m256i b = _mm256_loadu_si256((const __m256i *)(src + i + VECTOR));
                _mm256_store_si256((__m256i *)(dst + i), a);
                _mm256_store_si256((__m256i *)(dst + i + VECTOR), b);
            }
        }
    }
    memcpy(dst + begin, src + begin, nbytes - begin);
}

static inline void copy_aligned(void *dst, const void *src, size_t nbytes, copy_lines_fn copy_lines)
{
    char *to = dst;
    const char *from = src;
    size_t head = -(uintptr_t)to % LINE;
    head = head < nbytes ? head : nbytes;
    const size_t lines = (nbytes - head) / LINE * LINE, tail = nbytes - head - lines;
    if (head)
        memcpy(to, from, head);
    copy_lines(to + head, from + head, lines);
    if (tail)
        memcpy(to + head + lines, from + head + lines, tail);
}

static void copy_streamed(void *dst, const void *src, size_t nbytes) { copy_aligned(dst, src, nbytes, stream_lines); }
static void copy_by_pages(void *dst, const void *src, size_t nbytes) { copy_aligned(dst, src, nbytes, copy_pages); }

void NAME(copy_kernels_init)(struct kernel_table *table)
{
    table->long_copy = copy_by_pages;           // unless kernel_table_init replaces it by streamed_copy
    table->streamed_copy = copy_streamed;
}
#else
static void copy_scalar(void *dst, const void *src, size_t nbytes)
{
    if (nbytes)
        memcpy(dst, src, nbytes);
}

void copy_kernels_init_scalar(struct kernel_table *table) { table->long_copy = copy_scalar; }
#endif
