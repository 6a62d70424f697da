// A binary heap of (key, order, what): the smallest key first, then the earliest.
#ifndef NETWORK_HEAP_H
#define NETWORK_HEAP_H

#include <stddef.h>
#include <stdint.h>

struct heap_entry {
    int64_t key;
    uint64_t order;
    void *what;
    int kind;       // defined by the owner
};

struct heap {
    struct heap_entry *entries;
    size_t count, room;
    uint64_t pushed;
};

// Returns 0; -1: no memory.
int heap_push(struct heap *heap, int64_t key, void *what, int kind);

// The heap must not be empty.
struct heap_entry heap_pop(struct heap *heap);

void heap_fini(struct heap *heap);

#endif
