#include "run/fusion.h"

#include <stdlib.h>

#include "base/clock.h"

bool span_list_add(struct span_list *list, const struct tensor *tensor)
{
    if (list->count == list->capacity) {
        size_t capacity = list->capacity ? 2 * list->capacity : 64;
        struct span *grown = realloc(list->spans, capacity * sizeof *grown);
        if (!grown)
            return false;
        list->spans = grown;
        list->capacity = capacity;
    }
    list->spans[list->count++] = (struct span){tensor->src, tensor->dst, tensor->nbytes};
    list->nbytes += tensor->nbytes;
    return true;
}

void span_list_fini(struct span_list *list) { free(list->spans); }

struct span_cursor span_cursor_at(const struct span_list *list, size_t offset)
{
    struct span_cursor cursor = {list, 0, offset};
    while (cursor.span < list->count && cursor.offset >= list->spans[cursor.span].nbytes)
        cursor.offset -= list->spans[cursor.span++].nbytes;
    return cursor;
}

size_t span_cursor_next(struct span_cursor *cursor, size_t limit, const unsigned char **src, unsigned char **dst)
{
    const struct span_list *list = cursor->list;
    while (cursor->span < list->count && cursor->offset == list->spans[cursor->span].nbytes) {
        cursor->span++;
        cursor->offset = 0;
    }
    if (cursor->span == list->count || limit == 0)
        return 0;
    const struct span *span = &list->spans[cursor->span];
    size_t left = span->nbytes - cursor->offset, n = left < limit ? left : limit;
    *src = span->src + cursor->offset;
    *dst = span->dst + cursor->offset;
    cursor->offset += n;
    return n;
}

void span_cursor_skip(struct span_cursor *cursor, size_t nbytes)
{
    const unsigned char *src;
    unsigned char *dst;
    for (size_t n; (n = span_cursor_next(cursor, nbytes, &src, &dst)); nbytes -= n)
        ;
}

void span_pack(struct span_cursor *cursor, void *to, size_t nbytes)
{
    const unsigned char *src;
    unsigned char *dst, *at = to;
    for (size_t n; (n = span_cursor_next(cursor, nbytes, &src, &dst)); nbytes -= n, at += n)
        memcpy(at, src, n);
}

void span_unpack(struct span_cursor *cursor, const void *from, size_t nbytes)
{
    const unsigned char *src, *at = from;
    unsigned char *dst;
    for (size_t n; (n = span_cursor_next(cursor, nbytes, &src, &dst)); nbytes -= n, at += n)
        memcpy(dst, at, n);
}

// The span that holds all of the piece, or NULL. *at: where in it.
static const struct span *whole_span(const struct span_list *list, size_t offset, size_t nbytes, size_t *at)
{
    struct span_cursor cursor = span_cursor_at(list, offset);
    const struct span *span = &list->spans[cursor.span];
    *at = cursor.offset;
    return cursor.span < list->count && span->nbytes - cursor.offset >= nbytes ? span : NULL;
}

const void *span_source(const struct span_list *list, size_t offset, size_t nbytes, void *scratch)
{
    size_t at;
    const struct span *span = whole_span(list, offset, nbytes, &at);
    if (span)
        return span->src + at;
    struct span_cursor cursor = span_cursor_at(list, offset);
    span_pack(&cursor, scratch, nbytes);
    return scratch;
}

void *span_target(const struct span_list *list, size_t offset, size_t nbytes, void *scratch)
{
    size_t at;
    const struct span *span = whole_span(list, offset, nbytes, &at);
    return span ? span->dst + at : scratch;
}

void span_store(const struct span_list *list, size_t offset, size_t nbytes, const void *from)
{
    size_t at;
    if (whole_span(list, offset, nbytes, &at))
        return;
    struct span_cursor cursor = span_cursor_at(list, offset);
    span_unpack(&cursor, from, nbytes);
}

enum { SMALLEST = 8192, TOO_LARGE = 8 };

// Contents are lost.
static bool grow(struct fusion_buffer *buffer, size_t size)
{
    buffer->used_ns = clock_now_ns();
    if (buffer->size >= size && buffer->data)
        return true;
    size_t rounded = SMALLEST;
    while (rounded < size)          // few different sizes, so that one that is kept fits again: fresh memory costs page faults
        rounded *= 2;
    free(buffer->data);
    buffer->data = aligned_alloc(64, rounded);
    buffer->size = buffer->data ? rounded : 0;
    return buffer->data;
}

void *fusion_acquire(struct run *run, int number, size_t size)
{
    return grow(&run->scratch[number], size) ? run->scratch[number].data : NULL;
}

// The smallest that is large enough and not far too large, so that one that was large once is idle and given back; else the largest
// that is too small, which grows, so that there are not ever more of them; else the smallest.
bool fusion_borrow(struct run *run, size_t size, struct fusion_buffer *out)
{
    const size_t limit = TOO_LARGE * (size > SMALLEST ? size : SMALLEST);
    struct fusion_buffer *fitting = NULL, *small = NULL, *least = &run->lent[0];
    for (int i = 0; i < FUSION_KEPT; i++) {
        struct fusion_buffer *other = &run->lent[i];
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

// Of more than are kept the smallest goes.
void fusion_return(struct run *run, struct fusion_buffer *buffer)
{
    struct fusion_buffer *smallest = &run->lent[0];
    buffer->used_ns = clock_now_ns();
    for (int i = 1; i < FUSION_KEPT; i++)
        if (run->lent[i].size < smallest->size)
            smallest = &run->lent[i];
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

void fusion_trim(struct run *run, int64_t now_ns)
{
    for (size_t i = 0; i < sizeof run->scratch / sizeof *run->scratch; i++)
        trim(&run->scratch[i], now_ns);
    for (int i = 0; i < FUSION_KEPT; i++)
        trim(&run->lent[i], now_ns);
}

void fusion_fini(struct run *run)
{
    for (size_t i = 0; i < sizeof run->scratch / sizeof *run->scratch; i++)
        free(run->scratch[i].data);
    for (int i = 0; i < FUSION_KEPT; i++)
        free(run->lent[i].data);
}
