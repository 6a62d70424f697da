// Memory that operations work in: kept from one to the next, and given back when it has been idle.
#include "check.h"

#include "base/clock.h"
#include "run/fusion.h"

enum { SMALL = 8192, LARGE = 1 << 26 };

static size_t kept(const struct run *run)
{
    size_t sum = 0;
    for (int i = 0; i < FUSION_KEPT; i++)
        sum += run->lent[i].size;
    for (int i = 0; i < 3; i++)
        sum += run->scratch[i].size;
    return sum;
}

static void use(struct run *run, size_t size)
{
    struct fusion_buffer buffer;
    CHECK(fusion_borrow(run, size, &buffer) && buffer.size >= size);
    fusion_return(run, &buffer);
}

TEST(memory_that_has_been_idle_is_given_back)
{
    struct run *run = calloc(1, sizeof *run);
    use(run, LARGE);
    CHECK(fusion_acquire(run, 0, LARGE));
    CHECK_EQ(kept(run), 2 * LARGE);
    fusion_trim(run, clock_now_ns());
    CHECK_EQ(kept(run), 2 * LARGE);
    fusion_trim(run, clock_now_ns() + (FUSION_IDLE_MS + 1) * INT64_C(1000000));
    CHECK_EQ(kept(run), 0);
    free(run);
}

TEST(small_operations_do_not_keep_large_memory)
{
    struct run *run = calloc(1, sizeof *run);
    struct fusion_buffer buffer;
    use(run, LARGE);
    CHECK(fusion_borrow(run, SMALL, &buffer));
    CHECK_EQ(buffer.size, SMALL);
    fusion_return(run, &buffer);
    CHECK(fusion_borrow(run, LARGE / 2, &buffer));      // which is not far too large
    CHECK_EQ(buffer.size, LARGE);
    fusion_return(run, &buffer);
    CHECK_EQ(kept(run), LARGE + SMALL);
    fusion_fini(run);
    free(run);
}
