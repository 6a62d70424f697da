// Ranges of cached ids: consecutive ids become one item, whatever else is in the frame; malformed ranges are rejected.
#include "check.h"

#include "core/message/frame.h"
#include "core/negotiation/coordinator.h"
#include "virtual_network.h"

enum { RUN_BYTES = 9 };

static struct id_range take(struct bytes_reader *r)
{
    CHECK(bytes_take_u8(r) == ITEM_CACHED);
    return id_range_take(r);
}

TEST(consecutive_ids_are_one_item)
{
    struct bytes out = {0};
    struct id_range range = {0};
    const uint32_t ids[] = {7, 8, 9, 11, 10, 11, UINT32_MAX};
    const struct id_range expected[] = {{.id = 7, .count = 3}, {.id = 11, .count = 1}, {.id = 10, .count = 2},
                                          {.id = UINT32_MAX, .count = 1}};
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++)
        id_range_put(&range, &out, ids[i]);
    CHECK(out.size == 4 * RUN_BYTES);
    struct bytes_reader r = bytes_read(&out);
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        struct id_range taken = take(&r);
        CHECK(!r.failed && taken.id == expected[i].id && taken.count == expected[i].count);
    }
    CHECK(r.at == r.end);
    bytes_fini(&out);
}

// Another item ends the current range, which keeps the order of the items.
TEST(another_item_ends_the_run)
{
    struct bytes out = {0};
    struct id_range range = {0};
    id_range_put(&range, &out, 1);
    bytes_put_u8(&out, ITEM_FULL);
    id_range_put(&range, &out, 2);
    CHECK(out.size == 2 * RUN_BYTES + 1);
    struct bytes_reader r = bytes_read(&out);
    CHECK(take(&r).count == 1);
    CHECK(bytes_take_u8(&r) == ITEM_FULL);
    struct id_range second = take(&r);
    CHECK(second.id == 2 && second.count == 1);
    bytes_fini(&out);
}

TEST(a_long_run_is_cut)
{
    struct bytes out = {0};
    struct id_range range = {0};
    for (uint32_t id = 1; id <= ID_RANGE_MAX + 1; id++)
        id_range_put(&range, &out, id);
    struct bytes_reader r = bytes_read(&out);
    CHECK(take(&r).count == ID_RANGE_MAX);
    CHECK(take(&r).id == ID_RANGE_MAX + 1 && !r.failed && r.at == r.end);
    bytes_fini(&out);
}

TEST(malformed_runs_are_refused)
{
    const uint32_t counts[] = {0, ID_RANGE_MAX + 1, UINT32_MAX};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        struct bytes out = {0};
        bytes_put_u32(&out, 1);
        bytes_put_u32(&out, counts[i]);
        struct bytes_reader r = bytes_read(&out), cut = {out.data, out.data + out.size - 1, false};
        id_range_take(&r);
        id_range_take(&cut);
        CHECK(r.failed && cut.failed);
        bytes_fini(&out);
    }
}

// Rank 1 requests unknown ids and never replies to the questions about them.
TEST(unknown_ids_without_bound_break_the_protocol)
{
    struct bytes items = {0};
    begin_job("AB", 0, NULL);
    bhvd_context *ctx = ranks[0].ctx;
    bytes_put_u8(&items, ITEM_CACHED);
    bytes_put_u32(&items, 1000);
    bytes_put_u32(&items, ID_RANGE_MAX);
    CHECK_STATUS(coordinator_on_requests(ctx, (int[]){1}, 1, bytes_read(&items)), BHVD_OK);
    CHECK_STATUS(coordinator_on_requests(ctx, (int[]){1}, 1, bytes_read(&items)), BHVD_ERR_SYSTEM);
    CHECK_EQ(ctx->exec.failure.rank, 1);
    bytes_fini(&items);
    end_ranks();
}
