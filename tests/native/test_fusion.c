// Buffers for operations: reused from one to the next, and freed after a time without use.
#include "check.h"

#include "base/clock.h"
#include "run/fusion.h"

enum { SMALL = 8192, LARGE = 1 << 26 };

static size_t kept(const struct fusion *fusion)
{
    size_t sum = 0;
    for (int i = 0; i < FUSION_KEPT; i++)
        sum += fusion->idle[i].size;
    return sum + fusion->scratch.size;
}

static void use(struct fusion *fusion, size_t size)
{
    struct fusion_buffer buffer;
    CHECK(fusion_borrow(fusion, size, &buffer) && buffer.size >= size);
    fusion_return(fusion, &buffer);
}

TEST(memory_that_has_been_idle_is_given_back)
{
    struct fusion *fusion = calloc(1, sizeof *fusion);
    use(fusion, LARGE);
    CHECK(fusion_acquire(fusion, LARGE));
    CHECK_EQ(kept(fusion), 2 * LARGE);
    fusion_trim(fusion, clock_now_ns());
    CHECK_EQ(kept(fusion), 2 * LARGE);
    fusion_trim(fusion, clock_now_ns() + (FUSION_IDLE_MS + 1) * INT64_C(1000000));
    CHECK_EQ(kept(fusion), 0);
    free(fusion);
}

TEST(small_operations_do_not_keep_large_memory)
{
    struct fusion *fusion = calloc(1, sizeof *fusion);
    struct fusion_buffer buffer;
    use(fusion, LARGE);
    CHECK(fusion_borrow(fusion, SMALL, &buffer));
    CHECK_EQ(buffer.size, SMALL);
    fusion_return(fusion, &buffer);
    CHECK(fusion_borrow(fusion, LARGE / 2, &buffer));      // not much too large
    CHECK_EQ(buffer.size, LARGE);
    fusion_return(fusion, &buffer);
    CHECK_EQ(kept(fusion), LARGE + SMALL);
    fusion_fini(fusion);
    free(fusion);
}
