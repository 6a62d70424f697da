// A cache of agreements, found by name and by id, that evicts the least recently used. Engine only.
#pragma once

#include "core/message/request.h"

// The first member of both kinds of entries.
struct lru_entry {
    struct table_node by_name, by_id;
    struct lru_entry *older, *newer;
    uint32_t id;
    struct operation_key key;               // name inside a request
    struct lru_entry **user;                // the reference of an operation in progress, which prevents eviction; NULL: none
};

struct lru_cache {
    struct table by_name, by_id;
    struct lru_entry *oldest, *newest;
    void (*free)(void *entry);
};

// The entry, whose first member is a struct lru_entry. NULL: none.
void *lru_find(const struct lru_cache *cache, const struct operation_key *key);
void *lru_find_id(const struct lru_cache *cache, uint32_t id);
// The caller has set its id and key; it becomes the newest. False: no memory.
bool lru_insert(struct lru_cache *cache, struct lru_entry *entry);
void lru_touch(struct lru_cache *cache, struct lru_entry *entry);            // it becomes the newest
// Removes the entry of this name and, if the cache is full, the least recently used one. False: all are in use.
bool lru_make_room(struct lru_cache *cache, size_t capacity, const struct operation_key *key);
void lru_remove(struct lru_cache *cache, struct lru_entry *entry);           // removes and frees it
void lru_fini(struct lru_cache *cache);

static inline void lru_pin(struct lru_entry *entry, struct lru_entry **user)
{
    entry->user = user;
    *user = entry;
}

static inline void lru_unpin(struct lru_entry **user)
{
    if (*user)
        (*user)->user = NULL;
    *user = NULL;
}
