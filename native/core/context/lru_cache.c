#include "core/context/lru_cache.h"

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

bool lru_make_room(struct lru_cache *cache, size_t capacity, const struct operation_key *key)
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
