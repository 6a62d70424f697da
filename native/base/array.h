// Arrays that grow by doubling.
#pragma once

#include <stdbool.h>
#include <stdlib.h>

// Ensures memory for one more item after `count`; `capacity` is the number of items that fit. Both `items` and `capacity` may
// change. least: the initial capacity. False: no memory, nothing has changed.
#define array_reserve(items, count, capacity, least) __extension__({        \
    bool there_ = (count) < (capacity);                                     \
    if (!there_) {                                                          \
        const size_t grown_ = (capacity) ? 2 * (size_t)(capacity) : (least); \
        __auto_type moved_ = realloc((items), grown_ * sizeof *(items));    \
        if ((there_ = moved_)) {                                            \
            (items) = moved_;                                               \
            (capacity) = (__typeof__(capacity))grown_;                      \
        }                                                                   \
    }                                                                       \
    there_;                                                                 \
})
