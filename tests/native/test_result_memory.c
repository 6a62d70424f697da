// Memory of results and executions: freed memory is reused for the same size, at most the documented amount is kept, and memory
// that has been idle is given back.
#include "executor/collective.h"

#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "base/block_pool.h"
#include "base/clock.h"
#include "check.h"

TEST(a_freed_block_serves_the_next_of_its_size)
{
    char *first = block_pool_acquire(&result_memory, 1 << 20);
    CHECK(first && (uintptr_t)first % BLOCK_ALIGNMENT == 0);
    memset(first, 7, 1 << 20);
    char *second = block_pool_acquire(&result_memory, 1 << 20);
    CHECK(second && second != first);
    block_pool_release(&result_memory, first);
    char *other_size = block_pool_acquire(&result_memory, 4 << 20);
    CHECK(other_size && other_size != first);
    char *smaller = block_pool_acquire(&result_memory, (1 << 20) - 1000);
    CHECK(smaller == first);
    block_pool_release(&result_memory, smaller);
    char *much_smaller = block_pool_acquire(&result_memory, 200 << 10);
    CHECK(much_smaller && much_smaller != first);
    CHECK(block_pool_acquire(&result_memory, 1 << 20) == first);
    block_pool_release(&result_memory, first);
    block_pool_release(&result_memory, second);
    block_pool_release(&result_memory, other_size);
    block_pool_release(&result_memory, much_smaller);
    block_pool_release(&result_memory, NULL);
}

TEST(no_more_is_kept_than_promised)
{
    CHECK(block_pool_acquire(&result_memory, SIZE_MAX - 10) == NULL);
    char *small = block_pool_acquire(&result_memory, 1);
    CHECK(small);
    small[0] = 1;
    block_pool_release(&result_memory, small);
    char *too_large = block_pool_acquire(&result_memory, RESULT_MEMORY_KEPT + 1);
    CHECK(too_large);
    block_pool_release(&result_memory, too_large);           // the leak check would report it if it were kept
    char *blocks[20];
    for (int i = 0; i < 20; i++) {
        blocks[i] = block_pool_acquire(&result_memory, RESULT_MEMORY_KEPT / 4);
        CHECK(blocks[i]);
    }
    for (int i = 0; i < 20; i++)
        block_pool_release(&result_memory, blocks[i]);
    int again = 0;
    for (int i = 0; i < 4; i++) {
        char *block = block_pool_acquire(&result_memory, RESULT_MEMORY_KEPT / 4);
        for (int j = 16; j < 20; j++)
            again += block == blocks[j];
        blocks[i] = block;
    }
    CHECK(again == 4);                          // the last four that were freed
    for (int i = 0; i < 4; i++)
        block_pool_release(&result_memory, blocks[i]);
    block_pool_trim(&result_memory, CLOCK_NEVER);
    char *fresh = block_pool_acquire(&result_memory, RESULT_MEMORY_KEPT / 4);
    CHECK(fresh);
    memset(fresh, 1, RESULT_MEMORY_KEPT / 4);
    block_pool_release(&result_memory, fresh);
    block_pool_trim(&result_memory, CLOCK_NEVER);
    block_pool_trim(&result_memory, CLOCK_NEVER);
}

TEST(sizes_that_nobody_asks_for_any_more_make_room)
{
    struct block_pool pool = BLOCK_POOL(1 << 20);
    char *blocks[4];
    for (int i = 0; i < 4; i++)
        blocks[i] = block_pool_acquire(&pool, 256 << 10);
    for (int i = 0; i < 4; i++)
        block_pool_release(&pool, blocks[i]);
    char *larger = block_pool_acquire(&pool, 768 << 10);
    block_pool_release(&pool, larger);
    CHECK(block_pool_acquire(&pool, 768 << 10) == larger);
    block_pool_release(&pool, larger);
    CHECK_EQ(pool.nbytes, 1 << 20);
    block_pool_trim(&pool, CLOCK_NEVER);
    CHECK_EQ(pool.nbytes, 0);
}

TEST(memory_that_has_been_idle_is_given_back)
{
    struct block_pool pool = BLOCK_POOL(SIZE_MAX);
    char *idle = block_pool_acquire(&pool, 1 << 20), *used = block_pool_acquire(&pool, 1 << 20);
    block_pool_release(&pool, idle);
    block_pool_release(&pool, used);
    const int64_t since = clock_now_ns();
    CHECK(block_pool_acquire(&pool, 1 << 20) == used);      // caches may still hold the newest
    block_pool_trim(&pool, 0);
    CHECK_EQ(pool.nbytes, 1 << 20);
    block_pool_release(&pool, used);
    block_pool_trim(&pool, since);
    CHECK_EQ(pool.nbytes, 1 << 20);
    CHECK(block_pool_acquire(&pool, 1 << 20) == used);
    block_pool_release(&pool, used);
    block_pool_trim(&pool, clock_now_ns() + 1);
    CHECK_EQ(pool.nbytes, 0);
}

static void *use(void *arg)
{
    unsigned seed = (unsigned)(uintptr_t)arg;
    for (int i = 0; i < 2000; i++) {
        size_t size = (size_t)(seed = seed * 1103515245 + 12345) % (1 << 20) + 1;
        char *data = block_pool_acquire(&result_memory, size);
        if (!data)
            return "no memory";
        memset(data, (int)seed, size < 64 ? size : 64);
        data[size - 1] = (char)seed;
        if (data[0] != (char)seed && size > 1)
            return "shared by two threads";
        block_pool_release(&result_memory, data);
    }
    return NULL;
}

TEST(threads_share_nothing)
{
    pthread_t threads[4];
    for (uintptr_t i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, use, (void *)i) == 0);
    for (int i = 0; i < 4; i++) {
        void *failure;
        CHECK(pthread_join(threads[i], &failure) == 0 && failure == NULL);
    }
}
