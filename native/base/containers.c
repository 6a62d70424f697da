#include "base/containers.h"

static bool table_grow(struct table *t)
{
    size_t bucket_count = t->bucket_count ? 2 * t->bucket_count : 64;
    struct table_node **buckets = calloc(bucket_count, sizeof *buckets);
    if (!buckets)
        return false;
    for (size_t i = 0; i < t->bucket_count; i++) {
        for (struct table_node *node = t->buckets[i], *next; node; node = next) {
            next = node->next;
            struct table_node **head = &buckets[node->hash & (bucket_count - 1)];
            node->next = *head;
            *head = node;
        }
    }
    free(t->buckets);
    t->buckets = buckets;
    t->bucket_count = bucket_count;
    return true;
}

bool table_insert(struct table *t, struct table_node *node, uint64_t hash)
{
    if (t->count >= t->bucket_count && !table_grow(t) && t->bucket_count == 0)
        return false;           // if an existing table cannot grow, only its chains get longer
    struct table_node **head = &t->buckets[hash & (t->bucket_count - 1)];
    node->hash = hash;
    node->next = *head;
    *head = node;
    t->count++;
    return true;
}

struct table_node *table_find(const struct table *t, uint64_t hash, table_equal_fn equal, const void *key)
{
    if (t->bucket_count == 0)
        return NULL;
    struct table_node *node = t->buckets[hash & (t->bucket_count - 1)];
    while (node && !(node->hash == hash && equal(node, key)))
        node = node->next;
    return node;
}

void table_remove(struct table *t, struct table_node *node)
{
    struct table_node **at = &t->buckets[node->hash & (t->bucket_count - 1)];
    while (*at != node)
        at = &(*at)->next;
    *at = node->next;
    t->count--;
}

struct table_node *table_next(const struct table *t, const struct table_node *node)
{
    if (node && node->next)
        return node->next;
    size_t i = node ? (node->hash & (t->bucket_count - 1)) + 1 : 0;
    while (i < t->bucket_count && !t->buckets[i])
        i++;
    return i < t->bucket_count ? t->buckets[i] : NULL;
}

void table_fini(struct table *t)
{
    free(t->buckets);
    *t = (struct table){0};
}
