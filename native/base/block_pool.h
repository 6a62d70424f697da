// A pool of freed memory blocks, reused for requests of similar size: training requests the same sizes in every step, and the page
// faults of new memory cost more than copying into it. The newest block that fits is reused first, since caches may still hold it,
// and the oldest are freed first. Thread-safe, also in a forked child.
#pragma once

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "base/size.h"

enum {
    BLOCK_ALIGNMENT = CACHE_LINE,
    BLOCK_SMALLEST_KEPT = 128 << 10     // smaller blocks are left to malloc
};

struct block_pool {
    pthread_mutex_t lock;
    size_t most;                        // limit of the bytes kept
    size_t nbytes;                      // bytes kept
    struct block *blocks;               // newest first
};
#define BLOCK_POOL(most_nbytes) {.lock = PTHREAD_MUTEX_INITIALIZER, .most = (most_nbytes)}

// At least nbytes; NULL: out of memory.
void *block_pool_acquire(struct block_pool *pool, size_t nbytes);
// NULL is fine.
void block_pool_release(struct block_pool *pool, void *data);
// Frees the blocks that have not been used since; CLOCK_NEVER: all.
void block_pool_trim(struct block_pool *pool, int64_t since_ns);

// Requests huge pages for memory that has no pages yet: 512 times fewer faults when it is first written. Has no effect
// if no huge page fits or the system has none.
void pages_prefer_huge(void *data, size_t nbytes);
