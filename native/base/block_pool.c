#include "base/block_pool.h"

#include <stdint.h>
#include <stdlib.h>

#include "base/pages.h"

struct block {
    _Alignas(BLOCK_ALIGNMENT) size_t nbytes;        // of the data that follows
    struct block *next;
};

// The smallest block that fits, unless more than half of it would be wasted.
static struct block *find(struct block_pool *pool, size_t nbytes)
{
    struct block **best = NULL;
    for (struct block **at = &pool->blocks.head; *at && !(best && (*best)->nbytes == nbytes); at = &(*at)->next)
        if ((*at)->nbytes >= nbytes && (*at)->nbytes / 2 <= nbytes && (!best || (*at)->nbytes < (*best)->nbytes))
            best = at;
    if (!best)
        return NULL;
    pool->nbytes -= (*best)->nbytes;
    return fifo_remove(&pool->blocks, best, next);
}

// NULL: out of memory.
static struct block *allocate(size_t nbytes)
{
    struct block *block = aligned_alloc(BLOCK_ALIGNMENT, sizeof *block + nbytes);
    if (!block)
        return NULL;
    pages_prefer_huge(block, nbytes);
    block->nbytes = nbytes;
    return block;
}

void *block_pool_acquire(struct block_pool *pool, size_t nbytes)
{
    if (nbytes > SIZE_MAX / 2)
        return NULL;
    struct block *block = NULL;
    nbytes = size_round_up(nbytes, BLOCK_ALIGNMENT);
    // After a fork the lock may be held by a thread that does not exist in the child.
    if (nbytes >= BLOCK_SMALLEST_KEPT && pthread_mutex_trylock(&pool->lock) == 0) {
        block = find(pool, nbytes);
        pthread_mutex_unlock(&pool->lock);
    }
    if (!block)
        block = allocate(nbytes);
    return block ? block + 1 : NULL;
}

// Frees the oldest blocks until at most `most` bytes are kept. Called with the lock held; releases it.
static void shrink(struct block_pool *pool, size_t most)
{
    struct FIFO(struct block) freed = {0};
    while (pool->nbytes > most) {
        struct block *oldest = fifo_take(&pool->blocks, next);
        pool->nbytes -= oldest->nbytes;
        fifo_put(&freed, oldest, next);
    }
    pthread_mutex_unlock(&pool->lock);
    for (struct block *block; (block = fifo_take(&freed, next));)
        free(block);
}

void block_pool_release(struct block_pool *pool, void *data)
{
    if (!data)
        return;
    struct block *block = (struct block *)data - 1;
    if (block->nbytes < BLOCK_SMALLEST_KEPT || block->nbytes > pool->most || pthread_mutex_trylock(&pool->lock) != 0) {
        free(block);
        return;
    }
    fifo_put(&pool->blocks, block, next);
    pool->nbytes += block->nbytes;
    shrink(pool, pool->most);
}

void block_pool_trim(struct block_pool *pool)
{
    if (pthread_mutex_trylock(&pool->lock) == 0)
        shrink(pool, 0);
}
