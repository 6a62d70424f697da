// An intrusive first-in, first-out list: struct FIFO(struct item) items; Zeroed memory is an empty one. `link`: the member of an item
// that points to the next.
#ifndef BHVD_FIFO_H
#define BHVD_FIFO_H

#define FIFO(type) { type *head, **tail; }      // tail: where the next one goes; undefined while head is NULL

#define fifo_put(fifo, item, link) \
    (*((fifo)->head ? (fifo)->tail : &(fifo)->head) = (item), (item)->link = NULL, (fifo)->tail = &(item)->link)

// Takes out *at: head, or the link of the item before. Evaluates to it; NULL: there is none.
#define fifo_remove(fifo, at, link) __extension__({             \
    __typeof__((fifo)->head) *at_ = (at), taken_ = *at_;        \
    if (taken_ && !(*at_ = taken_->link))                       \
        (fifo)->tail = at_;                                     \
    taken_;                                                     \
})
#define fifo_take(fifo, link) fifo_remove(fifo, &(fifo)->head, link)

// Takes all: a list linked by `link`, which ends with NULL.
#define fifo_take_all(fifo) __extension__({ __typeof__((fifo)->head) all_ = (fifo)->head; (fifo)->head = NULL; all_; })

#endif
