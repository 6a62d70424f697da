#include "core/negotiation/response_cache.h"

#include <stdlib.h>

#include "core/context/operation.h"

// ---------------------------------------------------------------------------------------------------------- member

static void own_free(void *own)
{
    struct cache_entry *entry = own;
    bytes_fini(&entry->request);
    free(entry->numbers);
    free(entry);
}

struct cache_entry *response_cache_store(struct response_cache *cache, uint32_t id, const struct bhvd_operation *op)
{
    const struct operation_key key = operation_key_of(op);
    if (!lru_make_room(&cache->own, cache->capacity, &key))
        return NULL;
    struct cache_entry *entry = calloc(1, sizeof *entry);
    if (!entry)
        return NULL;
    bytes_put(&entry->request, op->request.data, op->request.size);
    entry->numbers = malloc((op->response_number_count + 1) * sizeof *entry->numbers);
    if (entry->request.failed || !entry->numbers) {
        own_free(entry);
        return NULL;
    }
    memcpy(entry->numbers, op->response_numbers, op->response_number_count * sizeof *entry->numbers);
    entry->number_count = op->response_number_count;
    entry->cached.id = id;
    // the name has the same offset in the copy of the request
    const char *name = (const char *)entry->request.data + (op->coll.name - (const char *)op->request.data);
    entry->cached.key = (struct operation_key){key.process_set, key.name_size, name};
    if (!lru_insert(&cache->own, &entry->cached)) {
        own_free(entry);
        return NULL;
    }
    return entry;
}

// ----------------------------------------------------------------------------------------------------- coordinator

static void coordinator_free(void *coordinators)
{
    struct coordinator_entry *entry = coordinators;
    for (int i = 0; i < entry->size; i++)
        request_release(entry->requests[i]);
    free(entry);
}

uint32_t coordinator_cache_store(struct response_cache *cache, struct request *const *requests, int size)
{
    if (!lru_make_room(&cache->coordinator, cache->capacity, &requests[0]->key))
        return 0;
    struct coordinator_entry *entry = calloc(1, sizeof *entry + (size_t)size * sizeof entry->requests[0]);
    if (!entry)
        return 0;
    entry->cached.id = ++cache->next_id ? cache->next_id : ++cache->next_id;      // 0 means "not cached"
    entry->size = size;
    for (int i = 0; i < size; i++) {
        entry->requests[i] = requests[i];
        request_retain(requests[i]);
    }
    entry->cached.key = requests[0]->key;
    if (!lru_insert(&cache->coordinator, &entry->cached)) {
        coordinator_free(entry);
        return 0;
    }
    return entry->cached.id;
}

struct response_cache *response_cache_create(int capacity)
{
    struct response_cache *cache = calloc(1, sizeof *cache);
    if (cache)
        *cache = (struct response_cache){.capacity = capacity > 0 ? (size_t)capacity : 0, .own.free = own_free,
                                         .coordinator.free = coordinator_free};
    return cache;
}

void response_cache_destroy(struct response_cache *cache)
{
    if (!cache)
        return;
    lru_fini(&cache->own);
    lru_fini(&cache->coordinator);
    free(cache);
}
