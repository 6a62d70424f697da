#include "heap.h"

#include <stdlib.h>

static int comes_before(const struct heap_entry *a, const struct heap_entry *b)
{
    return a->key < b->key || (a->key == b->key && a->order < b->order);
}

int heap_push(struct heap *heap, int64_t key, void *what, int kind)
{
    if (heap->count == heap->room) {
        size_t room = heap->room ? 2 * heap->room : 256;
        struct heap_entry *entries = realloc(heap->entries, room * sizeof *entries);
        if (!entries)
            return -1;
        heap->entries = entries;
        heap->room = room;
    }
    struct heap_entry new = {key, heap->pushed++, what, kind};
    size_t i = heap->count++;
    for (; i > 0 && comes_before(&new, &heap->entries[(i - 1) / 2]); i = (i - 1) / 2)
        heap->entries[i] = heap->entries[(i - 1) / 2];
    heap->entries[i] = new;
    return 0;
}

struct heap_entry heap_pop(struct heap *heap)
{
    struct heap_entry first = heap->entries[0], last = heap->entries[--heap->count];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < heap->count; i = child) {
        if (child + 1 < heap->count && comes_before(&heap->entries[child + 1], &heap->entries[child]))
            child++;
        if (!comes_before(&heap->entries[child], &last))
            break;
        heap->entries[i] = heap->entries[child];
    }
    heap->entries[i] = last;
    return first;
}

void heap_fini(struct heap *heap)
{
    free(heap->entries);
}
