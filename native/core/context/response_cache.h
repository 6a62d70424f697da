// The response cache: an operation that was agreed on once is then requested by id. Ids are assigned by the coordinator and
// never reused (before 2^32 others), so an unknown one is recognized and the full request is asked for (CACHE_MISS); no rank needs
// to know which entries another has evicted. Both sides keep at most `capacity` entries and evict the least recently used. Engine
// only.
#pragma once

#include "core/message/request.h"

// The first member of every kind of entry.
struct lru_entry {
    struct table_node by_name, by_id;
    struct lru_entry *older, *newer;
    uint32_t id;
    struct operation_key key;               // name inside a request
    struct lru_entry **user;                // the reference of an operation in progress, which prevents eviction; NULL: none
};

// Agreements, found by name and by id; the least recently used is evicted.
struct lru_cache {
    struct table by_name, by_id;
    struct lru_entry *oldest, *newest;
    void (*free)(void *entry);
};

// The entry, whose first member is a struct lru_entry. NULL: none.
void *lru_find(const struct lru_cache *cache, const struct operation_key *key);
void *lru_find_id(const struct lru_cache *cache, uint32_t id);
// Copies a request, and sets the entry's key to its own. False: no memory.
bool lru_copy_request(struct lru_entry *entry, struct bytes *copy, const struct bytes *request);
// The caller has set its id and key; it becomes the newest. False: no memory.
bool lru_insert(struct lru_cache *cache, struct lru_entry *entry);
void lru_touch(struct lru_cache *cache, struct lru_entry *entry);            // it becomes the newest
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

// A member's entry: its request for this name, and the id of the agreement.
struct cache_entry {
    struct lru_entry cached;
    struct bytes request;
    int64_t *numbers;
    size_t number_count;
};

// The coordinator's entry: every member's request under this id.
struct coordinator_entry {
    struct lru_entry cached;
    int size;
    struct request *requests[];             // by set rank
};

struct response_cache {
    size_t capacity;                        // of each list
    struct lru_cache own;                   // of struct cache_entry
    struct lru_cache coordinator;           // of struct coordinator_entry
    uint32_t next_id;
};

void response_cache_init(struct response_cache *cache, int capacity);
void response_cache_fini(struct response_cache *cache);

// Replaces the entry of the request's name. Without room (all are in use) or memory it is not cached.
void response_cache_store(struct response_cache *cache, uint32_t id, const struct bytes *request, const int64_t *numbers,
                          size_t number_count);
// Takes references to the requests. Returns the new id, 0 if it could not be stored.
uint32_t coordinator_cache_store(struct response_cache *cache, struct request *const *requests, int size);
