#include "core/context/cached_list.h"

static uint64_t id_hash(uint32_t id) { return id * 0x9e3779b97f4a7c15u >> 16; }

static bool has_key(const struct table_node *node, const void *arg)
{
    return operation_key_equals(&TABLE_CONTAINER(node, struct cached, by_name)->key, arg);
}

static bool has_id(const struct table_node *node, const void *id)
{
    return TABLE_CONTAINER(node, struct cached, by_id)->id == *(const uint32_t *)id;
}

void *cached_list_find(const struct cached_list *list, const struct operation_key *key)
{
    struct table_node *node = list->oldest ? table_find(&list->by_name, operation_hash(key), has_key, key) : NULL;
    return node ? TABLE_CONTAINER(node, struct cached, by_name) : NULL;
}

void *cached_list_find_id(const struct cached_list *list, uint32_t id)
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

void cached_list_use(struct cached_list *list, struct cached *entry)
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

void cached_list_forget(struct cached_list *list, struct cached *entry)
{
    if (entry->user)
        cached_release(entry->user);
    table_remove(&list->by_name, &entry->by_name);
    table_remove(&list->by_id, &entry->by_id);
    unlink_entry(list, entry);
    list->free(entry);
}

bool cached_list_make_room(struct cached_list *list, size_t capacity, const struct operation_key *key)
{
    struct cached *entry = cached_list_find(list, key);
    if (entry)
        cached_list_forget(list, entry);
    if (list->by_id.count < capacity)
        return true;
    for (entry = list->oldest; entry && entry->user;)
        entry = entry->newer;
    if (entry)
        cached_list_forget(list, entry);
    return entry != NULL;
}

void cached_list_fini(struct cached_list *list)
{
    while (list->oldest)
        cached_list_forget(list, list->oldest);
    table_fini(&list->by_name);
    table_fini(&list->by_id);
}
