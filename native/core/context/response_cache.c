#include "core/context/response_cache.h"

#include <stdlib.h>

static uint64_t id_hash(uint32_t id) { return id * 0x9e3779b97f4a7c15u >> 16; }

static bool has_key(const struct table_node *node, const void *arg)
{
    return operation_key_equals(&TABLE_CONTAINER(node, struct lru_entry, by_name)->key, arg);
}

static bool has_id(const struct table_node *node, const void *id)
{
    return TABLE_CONTAINER(node, struct lru_entry, by_id)->id == *(const uint32_t *)id;
}

void *lru_find(const struct lru_cache *cache, const struct operation_key *key)
{
    struct table_node *node = cache->oldest ? table_find(&cache->by_name, operation_hash(key), has_key, key) : NULL;
    return node ? TABLE_CONTAINER(node, struct lru_entry, by_name) : NULL;
}

void *lru_find_id(const struct lru_cache *cache, uint32_t id)
{
    struct table_node *node = table_find(&cache->by_id, id_hash(id), has_id, &id);
    return node ? TABLE_CONTAINER(node, struct lru_entry, by_id) : NULL;
}

static void unlink_entry(struct lru_cache *cache, struct lru_entry *entry)
{
    *(entry->older ? &entry->older->newer : &cache->oldest) = entry->newer;
    *(entry->newer ? &entry->newer->older : &cache->newest) = entry->older;
}

static void append(struct lru_cache *cache, struct lru_entry *entry)
{
    entry->older = cache->newest;
    entry->newer = NULL;
    *(cache->newest ? &cache->newest->newer : &cache->oldest) = entry;
    cache->newest = entry;
}

void lru_touch(struct lru_cache *cache, struct lru_entry *entry)
{
    if (cache->newest != entry) {
        unlink_entry(cache, entry);
        append(cache, entry);
    }
}

bool lru_copy_request(struct lru_entry *entry, struct bytes *copy, const struct bytes *request)
{
    bytes_put(copy, request->data, request->size);
    return !copy->failed && request_read_key(copy->data, copy->size, &entry->key);
}

bool lru_insert(struct lru_cache *cache, struct lru_entry *entry)
{
    if (!table_insert(&cache->by_name, &entry->by_name, operation_hash(&entry->key)))
        return false;
    if (!table_insert(&cache->by_id, &entry->by_id, id_hash(entry->id))) {
        table_remove(&cache->by_name, &entry->by_name);
        return false;
    }
    append(cache, entry);
    return true;
}

void lru_remove(struct lru_cache *cache, struct lru_entry *entry)
{
    if (entry->user)
        lru_unpin(entry->user);
    table_remove(&cache->by_name, &entry->by_name);
    table_remove(&cache->by_id, &entry->by_id);
    unlink_entry(cache, entry);
    cache->free(entry);
}

// Removes the entry of this name and, if the cache is full, the least recently used one. False: all are in use.
static bool make_room(struct lru_cache *cache, size_t capacity, const struct operation_key *key)
{
    struct lru_entry *entry = lru_find(cache, key);
    if (entry)
        lru_remove(cache, entry);
    if (cache->by_id.count < capacity)
        return true;
    for (entry = cache->oldest; entry && entry->user;)
        entry = entry->newer;
    if (entry)
        lru_remove(cache, entry);
    return entry != NULL;
}

void lru_fini(struct lru_cache *cache)
{
    while (cache->oldest)
        lru_remove(cache, cache->oldest);
    table_fini(&cache->by_name);
    table_fini(&cache->by_id);
}

// ---------------------------------------------------------------------------------------------------------- member

static void own_free(void *own)
{
    struct cache_entry *entry = own;
    bytes_fini(&entry->request);
    free(entry->numbers);
    free(entry);
}

void response_cache_store(struct response_cache *cache, uint32_t id, const struct bytes *request, const int64_t *numbers,
                          size_t number_count)
{
    struct cache_entry *entry = calloc(1, sizeof *entry);
    if (!entry)
        return;
    entry->cached.id = id;
    entry->number_count = number_count;
    entry->numbers = malloc((number_count + 1) * sizeof *numbers);
    if (entry->numbers)
        memcpy(entry->numbers, numbers, number_count * sizeof *numbers);
    if (!entry->numbers || !lru_copy_request(&entry->cached, &entry->request, request) ||
        !make_room(&cache->own, cache->capacity, &entry->cached.key) ||
        !lru_insert(&cache->own, &entry->cached))
        own_free(entry);
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
    struct coordinator_entry *entry = NULL;
    if (make_room(&cache->coordinator, cache->capacity, &requests[0]->key))
        entry = calloc(1, sizeof *entry + (size_t)size * sizeof entry->requests[0]);
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

void response_cache_init(struct response_cache *cache, int capacity)
{
    *cache = (struct response_cache){.capacity = capacity > 0 ? (size_t)capacity : 0, .own.free = own_free,
                                     .coordinator.free = coordinator_free};
}

void response_cache_fini(struct response_cache *cache)
{
    lru_fini(&cache->own);
    lru_fini(&cache->coordinator);
}
