#include "run/result_memory.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#include "base/pages.h"
#include "base/size.h"

// Pages that are new to a process cost more than what is copied into them, and a training asks for the same sizes in every
// step: freed blocks are kept for the next result of about their size.
enum {
    SLOTS = 8,
    SMALLEST_KEPT = 128 << 10               // below it malloc keeps them itself
};

struct block {
    size_t size;                            // of the data behind
};

static struct {
    pthread_mutex_t lock;
    struct block *blocks[SLOTS];            // the oldest first
    int count;
    size_t bytes;
} kept = {.lock = PTHREAD_MUTEX_INITIALIZER};

static struct block *block_of(void *data) { return (struct block *)((char *)data - RESULT_MEMORY_ALIGNMENT); }

static struct block *take(int slot)
{
    struct block *block = kept.blocks[slot];
    for (int i = slot + 1; i < kept.count; i++)
        kept.blocks[i - 1] = kept.blocks[i];
    kept.count--;
    kept.bytes -= block->size;
    return block;
}

// The smallest that is large enough and does not waste more than it serves.
static struct block *find(size_t size)
{
    int best = -1;
    for (int i = 0; i < kept.count; i++) {
        size_t has = kept.blocks[i]->size;
        if (has >= size && has / 2 <= size && (best < 0 || has < kept.blocks[best]->size))
            best = i;
    }
    return best < 0 ? NULL : take(best);
}

// NULL: out of memory.
static struct block *allocate(size_t size)
{
    struct block *block = aligned_alloc(RESULT_MEMORY_ALIGNMENT, RESULT_MEMORY_ALIGNMENT + size);
    if (!block)
        return NULL;
    pages_prefer_huge(block, size);
    block->size = size;
    return block;
}

void *result_memory_acquire(size_t nbytes)
{
    const size_t size = size_round_up(nbytes, RESULT_MEMORY_ALIGNMENT);
    struct block *block = NULL;
    if (nbytes > SIZE_MAX / 2)
        return NULL;
    // Who holds the lock may be a thread that a fork left behind.
    if (size >= SMALLEST_KEPT && pthread_mutex_trylock(&kept.lock) == 0) {
        block = find(size);
        pthread_mutex_unlock(&kept.lock);
    }
    if (!block)
        block = allocate(size);
    return block ? (char *)block + RESULT_MEMORY_ALIGNMENT : NULL;
}

void result_memory_release(void *data)
{
    if (!data)
        return;
    struct block *block = block_of(data), *freed[SLOTS + 1];
    int count = 0;
    if (block->size < SMALLEST_KEPT || block->size > RESULT_MEMORY_KEPT || pthread_mutex_trylock(&kept.lock) != 0) {
        free(block);
        return;
    }
    while (kept.count == SLOTS || kept.bytes + block->size > RESULT_MEMORY_KEPT)
        freed[count++] = take(0);
    kept.blocks[kept.count++] = block;
    kept.bytes += block->size;
    pthread_mutex_unlock(&kept.lock);
    while (count)
        free(freed[--count]);
}

void result_memory_trim(void)
{
    struct block *freed[SLOTS];
    int count = 0;
    if (pthread_mutex_trylock(&kept.lock) != 0)
        return;
    while (kept.count)
        freed[count++] = take(kept.count - 1);
    pthread_mutex_unlock(&kept.lock);
    while (count)
        free(freed[--count]);
}
