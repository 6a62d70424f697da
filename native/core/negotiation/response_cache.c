#include "core/negotiation/response_cache.h"

#include <stdlib.h>

#include "core/negotiation/coordinator.h"

// --------------------------------------------------------------------------------------- entries in the order of their use

static uint64_t id_hash(uint32_t id) { return id * 0x9e3779b97f4a7c15u >> 16; }

static bool has_key(const struct table_node *node, const void *arg)
{
    const struct operation_key *key = arg, *own = &TABLE_CONTAINER(node, struct cached, by_name)->key;
    return own->process_set == key->process_set && own->name_size == key->name_size &&
           memcmp(own->name, key->name, key->name_size) == 0;
}

static bool has_id(const struct table_node *node, const void *id)
{
    return TABLE_CONTAINER(node, struct cached, by_id)->id == *(const uint32_t *)id;
}

struct cached *cached_list_find(const struct cached_list *list, const struct operation_key *key)
{
    struct table_node *node = table_find(&list->by_name, operation_hash(key), has_key, key);
    return node ? TABLE_CONTAINER(node, struct cached, by_name) : NULL;
}

struct cached *cached_list_find_id(const struct cached_list *list, uint32_t id)
{
    struct table_node *node = table_find(&list->by_id, id_hash(id), has_id, &id);
    return node ? TABLE_CONTAINER(node, struct cached, by_id) : NULL;
}

static void unlink_entry(struct cached_list *list, struct cached *entry)
{
    *(entry->older ? &entry->older->newer : &list->oldest) = entry->newer;
    *(entry->newer ? &entry->newer->older : &list->newest) = entry->older;
}

static void append(struct cached_list *list, struct cached *entry)
{
    entry->older = list->newest;
    entry->newer = NULL;
    *(list->newest ? &list->newest->newer : &list->oldest) = entry;
    list->newest = entry;
}

static void list_use(struct cached_list *list, struct cached *entry)
{
    if (list->newest != entry) {
        unlink_entry(list, entry);
        append(list, entry);
    }
}

bool cached_list_insert(struct cached_list *list, struct cached *entry)
{
    if (!table_insert(&list->by_name, &entry->by_name, operation_hash(&entry->key)))
        return false;
    if (!table_insert(&list->by_id, &entry->by_id, id_hash(entry->id))) {
        table_remove(&list->by_name, &entry->by_name);
        return false;
    }
    append(list, entry);
    return true;
}

void cached_list_remove(struct cached_list *list, struct cached *entry)
{
    table_remove(&list->by_name, &entry->by_name);
    table_remove(&list->by_id, &entry->by_id);
    unlink_entry(list, entry);
}

// Forgets what is known of the name, and, where the list is full, what was not used for the longest time. False: all are in use.
static bool make_room(struct cached_list *list, size_t capacity, const struct operation_key *key,
                      void (*forget)(struct cached_list *list, struct cached *entry))
{
    struct cached *entry = cached_list_find(list, key);
    if (entry)
        forget(list, entry);
    if (list->by_id.count < capacity)
        return true;
    for (entry = list->oldest; entry && entry->user;)
        entry = entry->newer;
    if (entry)
        forget(list, entry);
    return entry != NULL;
}

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
    struct bhvd_handle *operation = entry->user;
    if (operation)
        operation->cached = NULL;
    cached_list_remove(list, entry);
    own_free(own_entry(entry));
}

void response_cache_forget(struct response_cache *cache, struct cache_entry *entry) { own_forget(&cache->own, &entry->cached); }

void response_cache_use(struct response_cache *cache, struct cache_entry *entry) { list_use(&cache->own, &entry->cached); }

struct cache_entry *response_cache_store(struct response_cache *cache, uint32_t id, const struct bhvd_handle *operation,
                                         const int64_t *agreed, size_t agreed_count)
{
    const struct operation_key key = {operation->process_set, operation->work.name_size, operation->work.name};
    if (!make_room(&cache->own, cache->capacity, &key, own_forget))
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
    struct pending *pending = entry->user;
    if (pending)
        pending->entry = NULL;
    cached_list_remove(list, entry);
    coordinator_free(coordinator_entry(entry));
}

void coordinator_cache_use(struct response_cache *cache, struct coordinator_entry *entry)
{
    list_use(&cache->coordinator, &entry->cached);
}

uint32_t coordinator_cache_store(struct response_cache *cache, struct request *const *requests, int size)
{
    if (!make_room(&cache->coordinator, cache->capacity, &requests[0]->key, coordinator_forget))
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

void cached_list_fini(struct cached_list *list, void (*forget)(struct cached_list *list, struct cached *entry))
{
    while (list->oldest)
        forget(list, list->oldest);
    free(list->by_name.buckets);
    free(list->by_id.buckets);
}

void response_cache_fini(struct response_cache *cache)
{
    cached_list_fini(&cache->own, own_forget);
    cached_list_fini(&cache->coordinator, coordinator_forget);
}
