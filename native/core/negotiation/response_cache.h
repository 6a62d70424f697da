// The response cache: an operation that was agreed on once is then requested by id. Ids are assigned by the coordinator and
// never reused (before 2^32 others), so an unknown one is recognized and the full request is asked for (CACHE_MISS); no rank needs
// to know which entries another has evicted. Both sides keep at most `capacity` entries and evict the least recently used. Engine
// only.
#pragma once

#include "core/context/lru_cache.h"

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

// NULL: no memory.
struct response_cache *response_cache_create(int capacity);
void response_cache_destroy(struct response_cache *cache);

// Replaces the entry of the name. NULL: no room (all in use) or no memory; then it is not cached.
struct cache_entry *response_cache_store(struct response_cache *cache, uint32_t id, const struct bhvd_operation *op);
// Takes references to the requests. Returns the new id, 0 if it could not be stored.
uint32_t coordinator_cache_store(struct response_cache *cache, struct request *const *requests, int size);
