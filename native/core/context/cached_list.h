// Agreements, found by name and by id, in the order of their use. Engine only.
#pragma once

#include "core/message/operation_key.h"

// What both kinds of entries begin with: found by name and by id, in the order of their use.
struct cached {
    struct table_node by_name, by_id;
    struct cached *older, *newer;
    uint32_t id;
    struct operation_key key;               // name inside a request
    struct cached **user;                   // where something in progress refers to this entry, which then is not evicted; NULL: nothing
};

struct cached_list {
    struct table by_name, by_id;
    struct cached *oldest, *newest;
    void (*free)(void *entry);
};

// The entry, which begins with a struct cached. NULL: none.
void *cached_list_find(const struct cached_list *list, const struct operation_key *key);
void *cached_list_find_id(const struct cached_list *list, uint32_t id);
// Its id and key are set; it becomes the newest. False: no memory.
bool cached_list_insert(struct cached_list *list, struct cached *entry);
void cached_list_use(struct cached_list *list, struct cached *entry);        // it becomes the newest
// Forgets the name and, where the list is full, what was not used for the longest time. False: all are in use.
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
