#include "core/negotiation/response_cache.h"

#include <stdlib.h>

#include "core/context/operation.h"

// ---------------------------------------------------------------------------------------------------------- member

// A cache_entry begins with what all entries have.
static struct cache_entry *own_entry(struct cached *entry) { return (struct cache_entry *)entry; }

struct cache_entry *response_cache_find(struct response_cache *cache, const struct operation_key *key)
{
    return own_entry(cached_list_find(&cache->own, key));
}

struct cache_entry *response_cache_find_id(struct response_cache *cache, uint32_t id)
{
    return own_entry(cached_list_find_id(&cache->own, id));
}

static void own_free(struct cache_entry *entry)
{
    bytes_fini(&entry->request);
    free(entry->agreed);
    free(entry);
}

static void own_forget(struct cached_list *list, struct cached *entry)
{
    if (entry->user)
        cached_release(entry->user);
    cached_list_remove(list, entry);
    own_free(own_entry(entry));
}

void response_cache_forget(struct response_cache *cache, struct cache_entry *entry) { own_forget(&cache->own, &entry->cached); }

void response_cache_use(struct response_cache *cache, struct cache_entry *entry) { cached_list_use(&cache->own, &entry->cached); }

struct cache_entry *response_cache_store(struct response_cache *cache, uint32_t id, const struct bhvd_handle *operation,
                                         const int64_t *agreed, size_t agreed_count)
{
    const struct operation_key key = operation_key_of(operation);
    if (!cached_list_make_room(&cache->own, cache->capacity, &key, own_forget))
        return NULL;
    struct cache_entry *entry = calloc(1, sizeof *entry);
    if (!entry)
        return NULL;
    bytes_put(&entry->request, operation->request.data, operation->request.size);
    entry->agreed = malloc((agreed_count + 1) * sizeof *agreed);
    if (entry->request.failed || !entry->agreed) {
        own_free(entry);
        return NULL;
    }
    memcpy(entry->agreed, agreed, agreed_count * sizeof *agreed);
    entry->agreed_count = agreed_count;
    entry->cached.id = id;
    // the name's place in the request is the same in the copy
    const char *name = (const char *)entry->request.data + (operation->work.name - (const char *)operation->request.data);
    entry->cached.key = (struct operation_key){key.process_set, key.name_size, name};
    if (!cached_list_insert(&cache->own, &entry->cached)) {
        own_free(entry);
        return NULL;
    }
    return entry;
}

// ----------------------------------------------------------------------------------------------------- coordinator

static struct coordinator_entry *coordinator_entry(struct cached *entry) { return (struct coordinator_entry *)entry; }

struct coordinator_entry *coordinator_cache_find_id(struct response_cache *cache, uint32_t id)
{
    return coordinator_entry(cached_list_find_id(&cache->coordinator, id));
}

static void coordinator_free(struct coordinator_entry *entry)
{
    for (int i = 0; i < entry->size; i++)
        request_drop(entry->requests[i]);
    free(entry);
}

static void coordinator_forget(struct cached_list *list, struct cached *entry)
{
    if (entry->user)
        cached_release(entry->user);
    cached_list_remove(list, entry);
    coordinator_free(coordinator_entry(entry));
}

void coordinator_cache_use(struct response_cache *cache, struct coordinator_entry *entry)
{
    cached_list_use(&cache->coordinator, &entry->cached);
}

uint32_t coordinator_cache_store(struct response_cache *cache, struct request *const *requests, int size)
{
    if (!cached_list_make_room(&cache->coordinator, cache->capacity, &requests[0]->key, coordinator_forget))
        return 0;
    struct coordinator_entry *entry = calloc(1, sizeof *entry + (size_t)size * sizeof entry->requests[0]);
    if (!entry)
        return 0;
    entry->cached.id = ++cache->next_id ? cache->next_id : ++cache->next_id;      // 0 means "not cached"
    entry->size = size;
    for (int i = 0; i < size; i++) {
        entry->requests[i] = requests[i];
        request_hold(requests[i]);
    }
    entry->cached.key = requests[0]->key;
    if (!cached_list_insert(&cache->coordinator, &entry->cached)) {
        coordinator_free(entry);
        return 0;
    }
    return entry->cached.id;
}

void coordinator_cache_forget_set(struct response_cache *cache, uint32_t process_set)
{
    for (struct cached *entry = cache->coordinator.oldest, *newer; entry; entry = newer) {
        newer = entry->newer;
        if (entry->key.process_set == process_set)
            coordinator_forget(&cache->coordinator, entry);
    }
}

struct response_cache *response_cache_create(int capacity)
{
    struct response_cache *cache = calloc(1, sizeof *cache);
    if (cache)
        cache->capacity = capacity > 0 ? (size_t)capacity : 0;
    return cache;
}

void response_cache_destroy(struct response_cache *cache)
{
    if (!cache)
        return;
    cached_list_fini(&cache->own, own_forget);
    cached_list_fini(&cache->coordinator, coordinator_forget);
    free(cache);
}
