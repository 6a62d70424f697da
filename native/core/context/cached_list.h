// Agreements, found by name and by id, in least recently used order. Engine only.
#pragma once

#include "core/message/operation_key.h"

// The first member of both kinds of entries.
struct cached {
    struct table_node by_name, by_id;
    struct cached *older, *newer;
    uint32_t id;
    struct operation_key key;               // name inside a request
    struct cached **user;                   // the reference of an operation in progress, which prevents eviction; NULL: none
};

struct cached_list {
    struct table by_name, by_id;
    struct cached *oldest, *newest;
    void (*free)(void *entry);
};

// The entry, whose first member is a struct cached. NULL: none.
void *cached_list_find(const struct cached_list *list, const struct operation_key *key);
void *cached_list_find_id(const struct cached_list *list, uint32_t id);
// The caller has set its id and key; it becomes the newest. False: no memory.
bool cached_list_insert(struct cached_list *list, struct cached *entry);
void cached_list_use(struct cached_list *list, struct cached *entry);        // it becomes the newest
// Removes the entry of this name and, if the list is full, the least recently used one. False: all are in use.
bool cached_list_make_room(struct cached_list *list, size_t capacity, const struct operation_key *key);
void cached_list_forget(struct cached_list *list, struct cached *entry);     // removes and frees it
void cached_list_fini(struct cached_list *list);

static inline void cached_hold(struct cached *entry, struct cached **user)
{
    entry->user = user;
    *user = entry;
}

static inline void cached_release(struct cached **user)
{
    if (*user)
        (*user)->user = NULL;
    *user = NULL;
}
