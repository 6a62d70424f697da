// An intrusive first-in, first-out list: struct FIFO(struct item) items; Zeroed memory is an empty list. `link`: the member of an
// item that points to the next.
#pragma once

#define FIFO(type) { type *head, **tail; }      // tail: where the next one goes; undefined while head is NULL

// The macros evaluate each argument once, so it may depend on fields that they change.
#define fifo_put(fifo, item, link) __extension__({                          \
    __auto_type put_to_ = (fifo);                                           \
    __auto_type put_ = (item);                                              \
    *(put_to_->head ? put_to_->tail : &put_to_->head) = put_;               \
    put_->link = NULL;                                                      \
    put_to_->tail = &put_->link;                                            \
})

// Removes *at (head, or the link of the previous item) and evaluates to it; NULL: *at was NULL.
#define fifo_remove(fifo, at, link) __extension__({                         \
    __auto_type from_ = (fifo);                                             \
    __typeof__(from_->head) *at_ = (at), taken_ = *at_;                     \
    if (taken_ && !(*at_ = taken_->link))                                   \
        from_->tail = at_;                                                  \
    taken_;                                                                 \
})
#define fifo_take(fifo, link) __extension__({                               \
    __auto_type take_from_ = (fifo);                                        \
    fifo_remove(take_from_, &take_from_->head, link);                       \
})

// Removes all items: evaluates to a list linked by `link` that ends with NULL.
#define fifo_take_all(fifo) __extension__({                                 \
    __auto_type take_from_ = (fifo);                                        \
    __typeof__(take_from_->head) all_ = take_from_->head;                   \
    take_from_->head = NULL;                                                \
    all_;                                                                   \
})
