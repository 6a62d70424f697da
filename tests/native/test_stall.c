// The stall check, in virtual time: rank 0 reports operations for which the others wait, as fields, until the missing rank has
// requested them; or it ends the job.
#include "post.h"
#include "virtual_network.h"

enum { RANKS = 3, OPERATIONS = BHVD_STALLED_NAMES + 1, WARNING_MS = 70000, SHUTDOWN_MS = 160000 };

// Until rank 0 has the requests, and then until its next check.
static const int64_t LATE_NS = 2500 * MS;

static void set_warning(int rank, struct bhvd_context_options *options)
{
    (void)rank;
    options->heartbeat_timeout_ms = 60000;
    options->stall_warning_ms = WARNING_MS;
}

static void set_shutdown(int rank, struct bhvd_context_options *options)
{
    set_warning(rank, options);
    options->stall_shutdown_ms = SHUTDOWN_MS;
}

static bhvd_handle *handles[RANKS][OPERATIONS];

static void post_all(int r)
{
    for (int i = 0; i < OPERATIONS; i++) {
        char name[200];
        snprintf(name, sizeof name, "%d, [%0150d]", i, i);
        handles[r][i] = post_barrier(ranks[r].ctx, name);
    }
}

static void check_fields(const struct bhvd_stalled *stalled, int late)
{
    CHECK_EQ(stalled->rank, late);
    CHECK_EQ(stalled->operations, OPERATIONS);
    for (int i = 0; i < BHVD_STALLED_NAMES; i++) {
        CHECK_EQ(strlen(stalled->names[i]), sizeof stalled->names[i] - 1);
        CHECK_STR_CONTAINS(stalled->names[i], ", [000000");
    }
}

TEST(who_stalls_is_told_in_fields)
{
    for (int late = 0; late < RANKS; late++) {
        struct bhvd_stalled stalled[RANKS] = {{0}};
        begin_job("ABC", (uint64_t)late, set_warning);
        bhvd_context *ctx = ranks[0].ctx;
        pass(10 * WARNING_MS * MS);
        CHECK_EQ(bhvd_context_stalled(ctx, stalled, RANKS), 0);
        for (int r = 0; r < RANKS; r++)
            if (r != late)
                post_all(r);
        pass(WARNING_MS * MS);
        CHECK_EQ(bhvd_context_stalled(ctx, stalled, RANKS), 0);
        pass(LATE_NS);
        CHECK_EQ(bhvd_context_stalled(ctx, stalled, RANKS), 1);
        CHECK_EQ(bhvd_context_stalled(ctx, stalled, 0), 0);
        check_fields(&stalled[0], late);
        pass(10 * WARNING_MS * MS);
        CHECK_EQ(bhvd_context_stalled(ctx, stalled, RANKS), 1);
        post_all(late);
        pass(LATE_NS);
        CHECK_EQ(bhvd_context_stalled(ctx, stalled, RANKS), 0);
        for (int i = 0; i < RANKS * OPERATIONS; i++)
            finish(handles[i % RANKS][i / RANKS], BHVD_OK);
        end_ranks();
    }
}

TEST(a_stall_ends_the_job)
{
    for (int late = 0; late < RANKS; late++) {
        bhvd_handle *barriers[RANKS] = {NULL};
        begin_job("ABC", (uint64_t)late, set_shutdown);
        pass(1000 * MS);
        for (int r = 0; r < RANKS; r++)
            barriers[r] = r == late ? NULL : post_barrier(ranks[r].ctx, "barrier");
        pass(SHUTDOWN_MS * MS);
        for (int r = 0; r < RANKS; r++)
            CHECK_STATUS(bhvd_context_status(ranks[r].ctx, NULL), BHVD_OK);
        pass(LATE_NS);
        for (int r = 0; r < RANKS; r++) {
            struct bhvd_error error;
            CHECK_STATUS(bhvd_context_status(ranks[r].ctx, &error), BHVD_ERR_SHUTDOWN);
            CHECK(error.cause == BHVD_CAUSE_TIMEOUT && error.rank == late);
            bhvd_context_first_loss(ranks[r].ctx, &error);
            CHECK(error.status == BHVD_ERR_SHUTDOWN && error.cause == BHVD_CAUSE_TIMEOUT && error.rank == late);
            if (barriers[r])
                finish(barriers[r], BHVD_ERR_SHUTDOWN);
        }
        end_ranks();
    }
}
