#include "base/block_pool.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "base/clock.h"

enum { HUGE_PAGE = 2 << 20 };

struct block {
    _Alignas(BLOCK_ALIGNMENT) size_t nbytes;        // of the data that follows
    int64_t used_ns;                                // time of the last use
    struct block *next;
};

// The smallest block that fits, unless more than half of it would be wasted.
static struct block *find(struct block_pool *pool, size_t nbytes)
{
    struct block **best = NULL;
    for (struct block **at = &pool->blocks; *at && !(best && (*best)->nbytes == nbytes); at = &(*at)->next)
        if ((*at)->nbytes >= nbytes && (*at)->nbytes / 2 <= nbytes && (!best || (*at)->nbytes < (*best)->nbytes))
            best = at;
    if (!best)
        return NULL;
    struct block *found = *best;
    *best = found->next;
    pool->nbytes -= found->nbytes;
    return found;
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
    if (!block && (block = aligned_alloc(BLOCK_ALIGNMENT, sizeof *block + nbytes))) {
        pages_prefer_huge(block, nbytes);
        block->nbytes = nbytes;
    }
    return block ? block + 1 : NULL;
}

// Frees the blocks that have not been used since, and the oldest ones beyond the limit. Called with the lock held; releases it.
static void shrink(struct block_pool *pool, int64_t since_ns)
{
    struct block **at = &pool->blocks;
    size_t kept = 0;
    for (; *at && (*at)->used_ns >= since_ns && kept + (*at)->nbytes <= pool->most; at = &(*at)->next)
        kept += (*at)->nbytes;
    struct block *freed = *at;
    *at = NULL;
    pool->nbytes = kept;
    pthread_mutex_unlock(&pool->lock);
    for (struct block *next; freed; freed = next) {
        next = freed->next;
        free(freed);
    }
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
    block->used_ns = clock_now_ns();
    block->next = pool->blocks;
    pool->blocks = block;
    pool->nbytes += block->nbytes;
    if (pool->nbytes > pool->most)
        shrink(pool, 0);
    else
        pthread_mutex_unlock(&pool->lock);
}

void block_pool_trim(struct block_pool *pool, int64_t since_ns)
{
    if (pthread_mutex_trylock(&pool->lock) == 0)
        shrink(pool, since_ns);
}

void pages_prefer_huge(void *data, size_t nbytes)
{
    const uintptr_t begin = ((uintptr_t)data + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    const uintptr_t end = ((uintptr_t)data + nbytes) / HUGE_PAGE * HUGE_PAGE;
    if (begin < end)
        madvise((void *)begin, end - begin, MADV_HUGEPAGE);
}
