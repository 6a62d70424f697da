// Runs of cached ids: consecutive ones become one item, whatever else is in the frame; malformed runs are refused.
#include "check.h"

#include "core/message/cached_run.h"
#include "core/message/frame.h"

enum { RUN_BYTES = 9 };

static struct cached_run take(struct bytes_reader *r)
{
    CHECK(bytes_take_u8(r) == ITEM_CACHED);
    return cached_run_take(r);
}

TEST(consecutive_ids_are_one_item)
{
    struct bytes out = {0};
    struct cached_run run = {0};
    const uint32_t ids[] = {7, 8, 9, 11, 10, 11, UINT32_MAX};
    const struct cached_run expected[] = {{.id = 7, .count = 3}, {.id = 11, .count = 1}, {.id = 10, .count = 2},
                                          {.id = UINT32_MAX, .count = 1}};
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++)
        cached_run_put(&run, &out, ids[i]);
    CHECK(out.size == 4 * RUN_BYTES);
    struct bytes_reader r = bytes_read(&out);
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        struct cached_run taken = take(&r);
        CHECK(!r.failed && taken.id == expected[i].id && taken.count == expected[i].count);
    }
    CHECK(r.at == r.end);
    bytes_fini(&out);
}

// What was written in between ends a run: the order of the items stays.
TEST(another_item_ends_the_run)
{
    struct bytes out = {0};
    struct cached_run run = {0};
    cached_run_put(&run, &out, 1);
    bytes_put_u8(&out, ITEM_FULL);
    cached_run_put(&run, &out, 2);
    CHECK(out.size == 2 * RUN_BYTES + 1);
    struct bytes_reader r = bytes_read(&out);
    CHECK(take(&r).count == 1);
    CHECK(bytes_take_u8(&r) == ITEM_FULL);
    struct cached_run second = take(&r);
    CHECK(second.id == 2 && second.count == 1);
    bytes_fini(&out);
}

TEST(a_long_run_is_cut)
{
    struct bytes out = {0};
    struct cached_run run = {0};
    for (uint32_t id = 1; id <= CACHED_RUN_MAX + 1; id++)
        cached_run_put(&run, &out, id);
    struct bytes_reader r = bytes_read(&out);
    CHECK(take(&r).count == CACHED_RUN_MAX);
    CHECK(take(&r).id == CACHED_RUN_MAX + 1 && !r.failed && r.at == r.end);
    bytes_fini(&out);
}

TEST(malformed_runs_are_refused)
{
    const uint32_t counts[] = {0, CACHED_RUN_MAX + 1, UINT32_MAX};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        struct bytes out = {0};
        bytes_put_u32(&out, 1);
        bytes_put_u32(&out, counts[i]);
        struct bytes_reader r = bytes_read(&out), cut = {out.data, out.data + out.size - 1, false};
        cached_run_take(&r);
        cached_run_take(&cut);
        CHECK(r.failed && cut.failed);
        bytes_fini(&out);
    }
}
