// Containers: first-in, first-out lists and hash tables of items that their owners embed, and arrays that grow.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// A first-in, first-out list: struct FIFO(struct item) items; Zeroed memory is an empty list. `link`: the member of an item that
// points to the next.
#define FIFO(type) { type *head, **tail; }      // tail: where the next one goes; undefined while head is NULL

// The macros evaluate each argument once, so it may depend on fields that they change.
#define fifo_put(fifo, item, link) __extension__({                          \
    __auto_type put_to_ = (fifo);                                           \
    __auto_type put_ = (item);                                              \
    *(put_to_->head ? put_to_->tail : &put_to_->head) = put_;               \
    put_->link = NULL;                                                      \
    put_to_->tail = &put_->link;                                            \
})

// Removes *at (head, or the link of the previous item) and evaluates to it; NULL: *at was NULL.
#define fifo_remove(fifo, at, link) __extension__({                         \
    __auto_type from_ = (fifo);                                             \
    __typeof__(from_->head) *at_ = (at), taken_ = *at_;                     \
    if (taken_ && !(*at_ = taken_->link))                                   \
        from_->tail = at_;                                                  \
    taken_;                                                                 \
})
#define fifo_take(fifo, link) __extension__({                               \
    __auto_type take_from_ = (fifo);                                        \
    fifo_remove(take_from_, &take_from_->head, link);                       \
})

// Removes all items: evaluates to a list linked by `link` that ends with NULL.
#define fifo_take_all(fifo) __extension__({                                 \
    __auto_type take_from_ = (fifo);                                        \
    __typeof__(take_from_->head) all_ = take_from_->head;                   \
    take_from_->head = NULL;                                                \
    all_;                                                                   \
})

// An array that grows by doubling: ensures memory for one more item after `count`; `capacity` is the number of items that fit. Both
// `items` and `capacity` may change. least: the initial capacity. False: no memory, nothing has changed.
#define array_reserve(items, count, capacity, least) __extension__({        \
    bool there_ = (count) < (capacity);                                     \
    if (!there_) {                                                          \
        const size_t grown_ = (capacity) ? 2 * (size_t)(capacity) : (least); \
        __auto_type moved_ = realloc((items), grown_ * sizeof *(items));    \
        if ((there_ = moved_)) {                                            \
            (items) = moved_;                                               \
            (capacity) = (__typeof__(capacity))grown_;                      \
        }                                                                   \
    }                                                                       \
    there_;                                                                 \
})

// A node of a hash table (chaining; grows by doubling; undefined order).
struct table_node {
    struct table_node *next;
    uint64_t hash;
};

struct table {
    struct table_node **buckets;
    size_t bucket_count;        // a power of two, or 0 before the first insertion
    size_t count;
};

typedef bool (*table_equal_fn)(const struct table_node *node, const void *key);

// Insertion fails only if there is no memory; the key must not be in the table.
bool table_insert(struct table *t, struct table_node *node, uint64_t hash);
struct table_node *table_find(const struct table *t, uint64_t hash, table_equal_fn equal, const void *key);
void table_remove(struct table *t, struct table_node *node);
// The node after this one; NULL: the first. Get it before `node` is removed or freed. Returns NULL at the end.
struct table_node *table_next(const struct table *t, const struct table_node *node);
// Does not free nodes; their owner may free them before or after.
void table_fini(struct table *t);

// FNV-1a.
static inline uint64_t table_hash(const void *data, size_t size, uint64_t seed)
{
    const unsigned char *p = data;
    uint64_t h = 14695981039346656037u ^ (seed * 0x9e3779b97f4a7c15u);
    for (size_t i = 0; i < size; i++)
        h = (h ^ p[i]) * 1099511628211u;
    return h ^ (h >> 32);
}

#define TABLE_CONTAINER(node, type, member) ((type *)((char *)(node) - offsetof(type, member)))
