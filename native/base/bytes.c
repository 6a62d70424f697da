#include "base/bytes.h"

#include <stdlib.h>

void bytes_fini(struct bytes *b)
{
    free(b->data);
    *b = (struct bytes){0};
}

void bytes_put(struct bytes *b, const void *data, size_t size)
{
    if (b->failed || size == 0)
        return;
    if (b->capacity - b->size < size) {
        size_t capacity = b->capacity ? b->capacity : 256;
        while (capacity - b->size < size)
            capacity *= 2;
        unsigned char *grown = realloc(b->data, capacity);
        if (!grown) {
            b->failed = true;
            return;
        }
        b->data = grown;
        b->capacity = capacity;
    }
    memcpy(b->data + b->size, data, size);
    b->size += size;
}

void bytes_shift(struct bytes *b, size_t size)
{
    if (size < b->size)
        memmove(b->data, b->data + size, b->size - size);
    b->size -= size;
}
