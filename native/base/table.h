// A hash table of nodes embedded in the user's structs (chaining; grows by doubling; undefined order).
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

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
