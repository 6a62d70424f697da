#include "core/response_cache.h"

#include <stdlib.h>

#include "core/coordinator.h"

// ---------------------------------------------------------------------------------------------------------- tables

static bool same_key(const struct operation_key *a, const struct operation_key *b)
{
    return a->process_set == b->process_set && a->name_size == b->name_size &&
           memcmp(a->name, b->name, a->name_size) == 0;
}

static uint64_t id_hash(uint32_t id) { return id * 0x9e3779b97f4a7c15u >> 16; }

static bool member_has_key(const struct table_node *node, const void *key)
{
    return same_key(&TABLE_CONTAINER(node, struct cache_entry, by_name)->key, key);
}

static bool member_has_id(const struct table_node *node, const void *id)
{
    return TABLE_CONTAINER(node, struct cache_entry, by_id)->id == *(const uint32_t *)id;
}

static bool coordinator_has_key(const struct table_node *node, const void *key)
{
    return same_key(&TABLE_CONTAINER(node, struct coordinator_entry, by_name)->key, key);
}

static bool coordinator_has_id(const struct table_node *node, const void *id)
{
    return TABLE_CONTAINER(node, struct coordinator_entry, by_id)->id == *(const uint32_t *)id;
}

// The list by use is the same for both kinds of entries: oldest ... newest.
#define LIST_REMOVE(oldest_, newest_, entry)                                            \
    do {                                                                                \
        *((entry)->older ? &(entry)->older->newer : &(oldest_)) = (entry)->newer;        \
        *((entry)->newer ? &(entry)->newer->older : &(newest_)) = (entry)->older;        \
    } while (0)

#define LIST_APPEND(oldest_, newest_, entry)             \
    do {                                                 \
        (entry)->older = (newest_);                      \
        (entry)->newer = NULL;                           \
        *((newest_) ? &(newest_)->newer : &(oldest_)) = (entry); \
        (newest_) = (entry);                             \
    } while (0)

// ---------------------------------------------------------------------------------------------------------- member

struct cache_entry *response_cache_find(struct response_cache *cache, const struct operation_key *key)
{
    struct table_node *node = table_find(&cache->by_name, operation_hash(key), member_has_key, key);
    return node ? TABLE_CONTAINER(node, struct cache_entry, by_name) : NULL;
}

struct cache_entry *response_cache_find_id(struct response_cache *cache, uint32_t id)
{
    struct table_node *node = table_find(&cache->by_id, id_hash(id), member_has_id, &id);
    return node ? TABLE_CONTAINER(node, struct cache_entry, by_id) : NULL;
}

static void entry_free(struct cache_entry *entry)
{
    bytes_fini(&entry->request);
    free(entry->agreed);
    free(entry);
}

void response_cache_forget(struct response_cache *cache, struct cache_entry *entry)
{
    if (entry->operation)
        entry->operation->cached = NULL;
    table_remove(&cache->by_name, &entry->by_name);
    table_remove(&cache->by_id, &entry->by_id);
    LIST_REMOVE(cache->oldest, cache->newest, entry);
    entry_free(entry);
}

void response_cache_use(struct response_cache *cache, struct cache_entry *entry)
{
    if (cache->newest != entry) {
        LIST_REMOVE(cache->oldest, cache->newest, entry);
        LIST_APPEND(cache->oldest, cache->newest, entry);
    }
}

struct cache_entry *response_cache_store(struct response_cache *cache, uint32_t id, const struct bhvd_handle *operation,
                                         const int64_t *agreed, size_t agreed_count)
{
    struct operation_key key = {operation->process_set, operation->name_size, operation->name};
    struct cache_entry *entry = response_cache_find(cache, &key);
    if (entry)
        response_cache_forget(cache, entry);
    if (cache->by_id.count >= cache->capacity) {
        struct cache_entry *victim = cache->oldest;
        while (victim && victim->operation)
            victim = victim->newer;
        if (!victim)
            return NULL;
        response_cache_forget(cache, victim);
    }
    entry = calloc(1, sizeof *entry);
    if (!entry)
        return NULL;
    bytes_put(&entry->request, operation->request.data, operation->request.size);
    entry->agreed = malloc((agreed_count + 1) * sizeof *agreed);
    if (entry->request.failed || !entry->agreed) {
        entry_free(entry);
        return NULL;
    }
    memcpy(entry->agreed, agreed, agreed_count * sizeof *agreed);
    entry->agreed_count = agreed_count;
    entry->id = id;
    // the name's place in the request is the same in the copy
    const char *name = (const char *)entry->request.data + (operation->name - (const char *)operation->request.data);
    entry->key = (struct operation_key){key.process_set, key.name_size, name};
    if (!table_insert(&cache->by_name, &entry->by_name, operation_hash(&entry->key))) {
        entry_free(entry);
        return NULL;
    }
    if (!table_insert(&cache->by_id, &entry->by_id, id_hash(id))) {
        table_remove(&cache->by_name, &entry->by_name);
        entry_free(entry);
        return NULL;
    }
    LIST_APPEND(cache->oldest, cache->newest, entry);
    return entry;
}

// ----------------------------------------------------------------------------------------------------- coordinator

struct coordinator_entry *coordinator_cache_find_id(struct response_cache *cache, uint32_t id)
{
    struct table_node *node = table_find(&cache->coordinator_by_id, id_hash(id), coordinator_has_id, &id);
    return node ? TABLE_CONTAINER(node, struct coordinator_entry, by_id) : NULL;
}

static void coordinator_entry_free(struct coordinator_entry *entry)
{
    for (int i = 0; i < entry->size; i++)
        request_drop(entry->requests[i]);
    free(entry);
}

static void coordinator_forget(struct response_cache *cache, struct coordinator_entry *entry)
{
    if (entry->pending)
        entry->pending->entry = NULL;
    table_remove(&cache->coordinator_by_name, &entry->by_name);
    table_remove(&cache->coordinator_by_id, &entry->by_id);
    LIST_REMOVE(cache->coordinator_oldest, cache->coordinator_newest, entry);
    coordinator_entry_free(entry);
}

void coordinator_cache_use(struct response_cache *cache, struct coordinator_entry *entry)
{
    if (cache->coordinator_newest != entry) {
        LIST_REMOVE(cache->coordinator_oldest, cache->coordinator_newest, entry);
        LIST_APPEND(cache->coordinator_oldest, cache->coordinator_newest, entry);
    }
}

uint32_t coordinator_cache_store(struct response_cache *cache, struct request *const *requests, int size)
{
    const struct operation_key *key = &requests[0]->key;
    struct table_node *node = table_find(&cache->coordinator_by_name, operation_hash(key), coordinator_has_key, key);
    if (node)
        coordinator_forget(cache, TABLE_CONTAINER(node, struct coordinator_entry, by_name));
    if (cache->coordinator_by_id.count >= cache->capacity) {
        struct coordinator_entry *victim = cache->coordinator_oldest;
        while (victim && victim->pending)
            victim = victim->newer;
        if (!victim)
            return 0;
        coordinator_forget(cache, victim);
    }
    struct coordinator_entry *entry = calloc(1, sizeof *entry + (size_t)size * sizeof entry->requests[0]);
    if (!entry)
        return 0;
    entry->id = ++cache->next_id ? cache->next_id : ++cache->next_id;      // 0 means "not cached"
    entry->size = size;
    for (int i = 0; i < size; i++) {
        entry->requests[i] = requests[i];
        request_hold(requests[i]);
    }
    entry->key = requests[0]->key;
    bool named = table_insert(&cache->coordinator_by_name, &entry->by_name, operation_hash(&entry->key));
    if (!named || !table_insert(&cache->coordinator_by_id, &entry->by_id, id_hash(entry->id))) {
        if (named)
            table_remove(&cache->coordinator_by_name, &entry->by_name);
        coordinator_entry_free(entry);
        return 0;
    }
    LIST_APPEND(cache->coordinator_oldest, cache->coordinator_newest, entry);
    return entry->id;
}

void coordinator_cache_forget_set(struct response_cache *cache, uint32_t process_set)
{
    for (struct coordinator_entry *entry = cache->coordinator_oldest, *newer; entry; entry = newer) {
        newer = entry->newer;
        if (entry->key.process_set == process_set)
            coordinator_forget(cache, entry);
    }
}

void response_cache_fini(struct response_cache *cache)
{
    while (cache->oldest)
        response_cache_forget(cache, cache->oldest);
    while (cache->coordinator_oldest)
        coordinator_forget(cache, cache->coordinator_oldest);
    free(cache->by_name.buckets);
    free(cache->by_id.buckets);
    free(cache->coordinator_by_name.buckets);
    free(cache->coordinator_by_id.buckets);
}
