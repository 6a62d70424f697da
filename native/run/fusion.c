#include "run/fusion.h"

#include <stdlib.h>

#include "base/clock.h"
#include "base/size.h"

enum { SMALLEST = 8192, TOO_LARGE = 8 };

// The contents are lost.
static bool grow(struct fusion_buffer *buffer, size_t size)
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

void *fusion_acquire(struct fusion *fusion, size_t size) { return grow(&fusion->scratch, size) ? fusion->scratch.data : NULL; }

// Takes the smallest buffer that is large enough but not far too large, so that a once large buffer is given back; else the
// largest one that is too small, and grows it, so that their number stays limited; else the smallest.
bool fusion_borrow(struct fusion *fusion, size_t size, struct fusion_buffer *out)
{
    const size_t limit = TOO_LARGE * (size > SMALLEST ? size : SMALLEST);
    struct fusion_buffer *fitting = NULL, *small = NULL, *least = &fusion->idle[0];
    for (int i = 0; i < FUSION_KEPT; i++) {
        struct fusion_buffer *other = &fusion->idle[i];
        if (other->size >= size && other->size <= limit && (!fitting || other->size < fitting->size))
            fitting = other;
        if (other->size < size && (!small || other->size > small->size))
            small = other;
        if (other->size < least->size)
            least = other;
    }
    struct fusion_buffer *best = fitting ? fitting : small ? small : least;
    *out = *best;
    *best = (struct fusion_buffer){0};
    return grow(out, size);
}

// If all slots are used, frees the smallest buffer.
void fusion_return(struct fusion *fusion, struct fusion_buffer *buffer)
{
    struct fusion_buffer *smallest = &fusion->idle[0];
    buffer->used_ns = clock_now_ns();
    for (int i = 1; i < FUSION_KEPT; i++)
        if (fusion->idle[i].size < smallest->size)
            smallest = &fusion->idle[i];
    if (buffer->data && buffer->size >= smallest->size) {
        free(smallest->data);
        *smallest = *buffer;
    } else {
        free(buffer->data);
    }
    *buffer = (struct fusion_buffer){0};
}

static void trim(struct fusion_buffer *buffer, int64_t now_ns)
{
    if (now_ns - buffer->used_ns < FUSION_IDLE_MS * INT64_C(1000000))
        return;
    free(buffer->data);
    *buffer = (struct fusion_buffer){0};
}

void fusion_trim(struct fusion *fusion, int64_t now_ns)
{
    trim(&fusion->scratch, now_ns);
    for (int i = 0; i < FUSION_KEPT; i++)
        trim(&fusion->idle[i], now_ns);
}

void fusion_fini(struct fusion *fusion)
{
    free(fusion->scratch.data);
    for (int i = 0; i < FUSION_KEPT; i++)
        free(fusion->idle[i].data);
}
