#include "transport/ring.h"

#include <string.h>

#include "base/size.h"

size_t ring_write(struct ring *ring, size_t capacity, const void *src, size_t size)
{
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    uint64_t head = atomic_load(&ring->head);   // sequentially consistent: see doorbell.h
    size_t n = size_min(size, capacity - (size_t)(tail - head));
    if (n == 0)
        return 0;
    size_t at = tail & (capacity - 1), first = size_min(n, capacity - at);
    memcpy(ring->data + at, src, first);
    memcpy(ring->data, (const char *)src + first, n - first);
    atomic_store(&ring->tail, tail + n);
    return n;
}

size_t ring_read(struct ring *ring, size_t capacity, void *dst, size_t size)
{
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    uint64_t tail = atomic_load(&ring->tail);
    size_t n = size_min(size, (size_t)(tail - head));
    if (n == 0)
        return 0;
    size_t at = head & (capacity - 1), first = size_min(n, capacity - at);
    memcpy(dst, ring->data + at, first);
    memcpy((char *)dst + first, ring->data, n - first);
    atomic_store(&ring->head, head + n);
    return n;
}
