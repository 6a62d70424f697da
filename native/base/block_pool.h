// Freed blocks of memory, kept for the next of about their size: a training asks for the same sizes in every step, and pages that are
// new to a process cost more than what is copied into them. The oldest make room for newer ones. Any thread, also in a forked child.
#pragma once

#include <pthread.h>
#include <stddef.h>

#include "base/fifo.h"
#include "base/size.h"

enum {
    BLOCK_ALIGNMENT = CACHE_LINE,
    BLOCK_SMALLEST_KEPT = 128 << 10     // below it malloc keeps them itself
};

struct block_pool {
    pthread_mutex_t lock;
    size_t most;                        // bytes that are kept, at most
    size_t nbytes;                      // that are kept
    struct FIFO(struct block) blocks;   // the oldest first
};
#define BLOCK_POOL(most_nbytes) {.lock = PTHREAD_MUTEX_INITIALIZER, .most = (most_nbytes)}

// At least nbytes; NULL: out of memory.
void *block_pool_acquire(struct block_pool *pool, size_t nbytes);
// NULL: nothing happens.
void block_pool_release(struct block_pool *pool, void *data);
// Keeps nothing any more of what was released until now.
void block_pool_trim(struct block_pool *pool);
