#include "executor/buffer_pool.h"

#include <stdlib.h>

#include "base/clock.h"
#include "base/size.h"

enum { SMALLEST = 8192, TOO_LARGE = 8 };

// The contents are lost.
static bool grow(struct pool_buffer *buffer, size_t size)
{
    buffer->used_ns = clock_now_ns();
    if (buffer->size >= size && buffer->data)
        return true;
    const size_t rounded = size_double_up(size, SMALLEST);
    free(buffer->data);
    buffer->data = aligned_alloc(64, rounded);
    buffer->size = buffer->data ? rounded : 0;
    return buffer->data;
}

void *buffer_pool_scratch(struct buffer_pool *pool, size_t size) { return grow(&pool->scratch, size) ? pool->scratch.data : NULL; }

// Takes the smallest buffer that is large enough but not far too large, so that a once large buffer is given back; else the
// largest one that is too small, and grows it, so that their number stays limited; else the smallest.
bool buffer_pool_acquire(struct buffer_pool *pool, size_t size, struct pool_buffer *out)
{
    const size_t limit = TOO_LARGE * (size > SMALLEST ? size : SMALLEST);
    struct pool_buffer *fitting = NULL, *small = NULL, *least = &pool->idle[0];
    for (int i = 0; i < BUFFER_POOL_KEPT; i++) {
        struct pool_buffer *other = &pool->idle[i];
        if (other->size >= size && other->size <= limit && (!fitting || other->size < fitting->size))
            fitting = other;
        if (other->size < size && (!small || other->size > small->size))
            small = other;
        if (other->size < least->size)
            least = other;
    }
    struct pool_buffer *best = fitting ? fitting : small ? small : least;
    *out = *best;
    *best = (struct pool_buffer){0};
    return grow(out, size);
}

// If all slots are used, frees the smallest buffer.
void buffer_pool_release(struct buffer_pool *pool, struct pool_buffer *buffer)
{
    struct pool_buffer *smallest = &pool->idle[0];
    buffer->used_ns = clock_now_ns();
    for (int i = 1; i < BUFFER_POOL_KEPT; i++)
        if (pool->idle[i].size < smallest->size)
            smallest = &pool->idle[i];
    if (buffer->data && buffer->size >= smallest->size) {
        free(smallest->data);
        *smallest = *buffer;
    } else {
        free(buffer->data);
    }
    *buffer = (struct pool_buffer){0};
}

static void trim(struct pool_buffer *buffer, int64_t now_ns)
{
    if (now_ns - buffer->used_ns < clock_ms_ns(BUFFER_POOL_IDLE_MS))
        return;
    free(buffer->data);
    *buffer = (struct pool_buffer){0};
}

void buffer_pool_trim(struct buffer_pool *pool, int64_t now_ns)
{
    trim(&pool->scratch, now_ns);
    for (int i = 0; i < BUFFER_POOL_KEPT; i++)
        trim(&pool->idle[i], now_ns);
}

void buffer_pool_fini(struct buffer_pool *pool)
{
    free(pool->scratch.data);
    for (int i = 0; i < BUFFER_POOL_KEPT; i++)
        free(pool->idle[i].data);
}
