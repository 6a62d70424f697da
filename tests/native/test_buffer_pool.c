// Buffers for operations: reused from one to the next, and freed after a time without use.
#include "check.h"

#include "base/clock.h"
#include "executor/buffer_pool.h"

enum { SMALL = 8192, LARGE = 1 << 26 };

static size_t kept(const struct buffer_pool *pool)
{
    size_t sum = 0;
    for (int i = 0; i < BUFFER_POOL_KEPT; i++)
        sum += pool->idle[i].size;
    return sum + pool->scratch.size;
}

static void use(struct buffer_pool *pool, size_t size)
{
    struct pool_buffer buffer;
    CHECK(buffer_pool_acquire(pool, size, &buffer) && buffer.size >= size);
    buffer_pool_release(pool, &buffer);
}

TEST(memory_that_has_been_idle_is_given_back)
{
    struct buffer_pool *pool = calloc(1, sizeof *pool);
    use(pool, LARGE);
    CHECK(buffer_pool_scratch(pool, LARGE));
    CHECK_EQ(kept(pool), 2 * LARGE);
    buffer_pool_trim(pool, clock_now_ns());
    CHECK_EQ(kept(pool), 2 * LARGE);
    buffer_pool_trim(pool, clock_now_ns() + clock_ms_ns(BUFFER_POOL_IDLE_MS + 1));
    CHECK_EQ(kept(pool), 0);
    free(pool);
}

TEST(small_operations_do_not_keep_large_memory)
{
    struct buffer_pool *pool = calloc(1, sizeof *pool);
    struct pool_buffer buffer;
    use(pool, LARGE);
    CHECK(buffer_pool_acquire(pool, SMALL, &buffer));
    CHECK_EQ(buffer.size, SMALL);
    buffer_pool_release(pool, &buffer);
    CHECK(buffer_pool_acquire(pool, LARGE / 2, &buffer));  // not much too large
    CHECK_EQ(buffer.size, LARGE);
    buffer_pool_release(pool, &buffer);
    CHECK_EQ(kept(pool), LARGE + SMALL);
    buffer_pool_fini(pool);
    free(pool);
}
