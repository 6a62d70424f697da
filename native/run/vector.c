#include "run/vector.h"

void vector_load(const struct vector *vector, const struct reduction *reduction, size_t begin, size_t nbytes)
{
    struct span_cursor cursor = span_cursor_at(vector->list, begin);
    unsigned char *to = vector->data + begin;
    const unsigned char *src;
    unsigned char *dst;
    for (size_t n; (n = span_cursor_next(&cursor, nbytes, &src, &dst)); nbytes -= n, to += n) {
        if (reduction->prescale != 1.0)
            reduction->scale(to, src, reduction->prescale, n / vector->element);
        else if (to != src)
            memcpy(to, src, n);
    }
}

void vector_store(const struct vector *vector, size_t begin, size_t nbytes)
{
    struct span_cursor cursor = span_cursor_at(vector->list, begin);
    if (vector->packed)
        span_unpack(&cursor, vector->data + begin, nbytes);
}
