#include "executor/collective.h"

#include "base/containers.h"

bool span_list_add(struct span_list *list, const struct tensor *tensor)
{
    if (!array_reserve(list->spans, list->count, list->capacity, 64))
        return false;
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

struct span span_cursor_next(struct span_cursor *cursor, size_t limit)
{
    const struct span_list *list = cursor->list;
    while (cursor->span < list->count && cursor->offset == list->spans[cursor->span].nbytes) {
        cursor->span++;
        cursor->offset = 0;
    }
    if (cursor->span == list->count || limit == 0)
        return (struct span){0};
    const struct span *span = &list->spans[cursor->span];
    const size_t offset = cursor->offset, n = size_min(span->nbytes - offset, limit);
    cursor->offset += n;
    return (struct span){span->src + offset, span->dst + offset, n};
}

void span_cursor_skip(struct span_cursor *cursor, size_t nbytes)
{
    for (size_t n; (n = span_cursor_next(cursor, nbytes).nbytes); nbytes -= n)
        ;
}

void span_list_cut(struct span_list *list, struct span_cursor *cursor, size_t nbytes)
{
    list->count = list->nbytes = 0;
    for (struct span s; (s = span_cursor_next(cursor, nbytes - list->nbytes)).nbytes; list->nbytes += s.nbytes)
        list->spans[list->count++] = s;
}

void span_pack(struct span_cursor *cursor, void *to, size_t nbytes)
{
    unsigned char *at = to;
    for (struct span s; (s = span_cursor_next(cursor, nbytes)).nbytes; nbytes -= s.nbytes, at += s.nbytes)
        memcpy(at, s.src, s.nbytes);
}

void span_unpack(struct span_cursor *cursor, const void *from, size_t nbytes)
{
    const unsigned char *at = from;
    for (struct span s; (s = span_cursor_next(cursor, nbytes)).nbytes; nbytes -= s.nbytes, at += s.nbytes)
        memcpy(s.dst, at, s.nbytes);
}

// The span that holds the whole piece, or NULL. *at: the offset in it.
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
