// Limits while other work makes continuous progress, such as requests of other ranks to the coordinator. In virtual time: each
// poll takes a microsecond.
#include "core/engine/engine.h"
#include "virtual_network.h"

static bool moves_without_end;

static bool poll_and_move(bhvd_context *ctx, bool poll_sockets)
{
    now_ns += moves_without_end ? 1000 : 0;
    return engine_poll(ctx, poll_sockets) || moves_without_end;
}

#define engine_poll poll_and_move
#include "core/api/progress.c"
#undef engine_poll

#include "core/negotiation/coordinator.h"
#include "executor/task.h"
#include "post.h"

enum { RANKS = 3, WAITS = 4, WARNING_MS = 10000 };

static const int64_t POLL_NS = 1000;

static void set_warning(int rank, struct bhvd_context_options *options)
{
    (void)rank;
    options->stall_warning_ms = WARNING_MS;
}

TEST(a_wait_ends_when_its_time_is_over)
{
    bhvd_handle *barriers[RANKS];
    struct bhvd_error error;
    begin_job("ABC", 0, set_warning);
    pause_init(&ranks[0].ctx->exec);
    barriers[0] = post_barrier(ranks[0].ctx, "barrier");
    moves_without_end = true;
    for (int i = 0, wait_ms = 1; i < WAITS; i++, wait_ms *= 10) {
        const int64_t begun_ns = now_ns;
        CHECK_STATUS(bhvd_wait(barriers[0], wait_ms, &error), BHVD_IN_PROGRESS);
        CHECK(now_ns - begun_ns >= wait_ms * MS && now_ns - begun_ns <= wait_ms * MS + POLLS_PER_CHECK * POLL_NS);
    }
    moves_without_end = false;
    for (int r = 1; r < RANKS; r++)
        barriers[r] = post_barrier(ranks[r].ctx, "barrier");
    pass(1000 * MS);
    for (int r = 0; r < RANKS; r++)
        finish(barriers[r], BHVD_OK);
    end_ranks();
}

TEST(stalls_are_looked_for)
{
    struct bhvd_stalled stalled[RANKS];
    begin_job("ABC", 0, set_warning);
    bhvd_handle *barrier = post_barrier(ranks[0].ctx, "barrier");
    engine_poll(ranks[0].ctx, false);
    now_ns += WARNING_MS * MS;
    for (int i = 0; i < 2 * POLLS_PER_CHECK; i++)
        engine_poll(ranks[0].ctx, false);
    CHECK_EQ(bhvd_context_stalled(ranks[0].ctx, stalled, RANKS), RANKS - 1);
    bhvd_handle_drop(barrier);
    end_ranks();
}

// Rank 0's hierarchical operation waits for its own host's rank 1, which waits for another host: that one is to be blamed.
TEST(a_wait_for_a_rank_of_the_same_host_times_out_later)
{
    for (int awaited = -1; awaited < 2; awaited += 2) {
        begin_job("ABC", 0, NULL);
        struct executor *exec = &ranks[0].ctx->exec;
        const int64_t limit_ns = clock_ms_ns(exec->timeout_ms);
        struct task task = {.awaited = awaited};
        fifo_put(&exec->tasks, &task, next);
        executor_check_progress(exec);
        now_ns += limit_ns;
        executor_check_progress(exec);
        CHECK_EQ(exec->failure.status, awaited < 0 ? BHVD_ERR_TIMEOUT : BHVD_OK);
        now_ns += limit_ns / 8;
        executor_check_progress(exec);
        CHECK_STATUS(exec->failure.status, BHVD_ERR_TIMEOUT);
        CHECK_EQ(exec->failure.rank, awaited);
        fifo_take_all(&exec->tasks);
        end_ranks();
    }
}
