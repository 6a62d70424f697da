// The rank and cause of a failure, as fields for programs: in the ranks' messages, and in every rank's error.
#include "base/status.h"
#include "core/context/context.h"
#include "core/context/operation.h"
#include "core/message/frame.h"
#include "core/negotiation/coordinator.h"
#include "job.h"
#include "virtual_network.h"

static _Atomic bool lacks_memory;
#define calloc(count, size) (lacks_memory ? NULL : calloc(count, size))
#include "core/negotiation/pending.c"
#undef calloc

static bool arrives(bhvd_status status, bhvd_cause cause, int rank, size_t cut)
{
    struct bhvd_error sent, received;
    struct bytes bytes = {0};
    error_set(&sent, status, "the sentence");
    error_blame(&sent, cause, rank);
    reason_put(&bytes, &sent);
    struct bytes_reader r = bytes_read(&bytes);
    r.end -= cut;
    const bool taken = reason_take(&r, (uint8_t)status, RANKS, &received);
    if (taken) {
        CHECK(r.at == r.end);
        CHECK(received.status == status && received.cause == cause && received.rank == rank);
        CHECK(strcmp(received.message, "the sentence") == 0);
    }
    bytes_fini(&bytes);
    return taken;
}

TEST(a_reason_is_read_as_it_was_written_or_not_at_all)
{
    for (int cause = BHVD_CAUSE_ENDED; cause < BHVD_CAUSE_COUNT; cause++) {
        CHECK(arrives(BHVD_ERR_PEER_LOST, cause, RANKS - 1, 0));
        CHECK(!arrives(BHVD_ERR_PEER_LOST, cause, RANKS, 0));
        CHECK(arrives(BHVD_ERR_PEER_LOST, cause, -1, 0) == (cause == BHVD_CAUSE_TIMEOUT));
    }
    CHECK(arrives(BHVD_ERR_MISMATCH, BHVD_CAUSE_NONE, -1, 0));
    CHECK(!arrives(BHVD_ERR_MISMATCH, BHVD_CAUSE_NONE, 0, 0));
    CHECK(!arrives(BHVD_ERR_PEER_LOST, BHVD_CAUSE_COUNT, 0, 0));
    CHECK(!arrives(BHVD_OK, BHVD_CAUSE_NONE, -1, 0) && !arrives(BHVD_IN_PROGRESS, BHVD_CAUSE_NONE, -1, 0));
    for (size_t cut = 1; cut < sizeof "the sentence" + 7; cut++)
        CHECK(!arrives(BHVD_ERR_MISMATCH, BHVD_CAUSE_NONE, -1, cut));
}

static bhvd_status outcome_of_barrier(bhvd_context *ctx, struct bhvd_error *error)
{
    const struct bhvd_args args = {.kind = BHVD_BARRIER, .name = "barrier", .device = -1, .prescale_factor = 1, .postscale_factor = 1};
    bhvd_handle *handle;
    bhvd_status status = bhvd_post(ctx, &args, &handle, error);
    if (now_ns >= 0)
        pass(1000 * MS);                // nobody else runs during the wait
    if (!status)
        status = bhvd_wait(handle, 300000, error);       // emulated ranks are slow
    bhvd_handle_drop(handle);
    return status;
}

static void expect(bhvd_context *ctx, bhvd_status status, bhvd_cause cause, int rank)
{
    struct bhvd_error error;
    CHECK_STATUS(outcome_of_barrier(ctx, &error), status);
    if (error.cause != cause || error.rank != rank)
        check_fail(__FILE__, __LINE__, "cause %d of rank %d, not %d of %d: %s", error.cause, error.rank, cause, rank, error.message);
    bhvd_context_first_loss(ctx, &error);
    CHECK(error.status == status && error.cause == cause && error.rank == rank);
}

static void wait_until_ready(struct job *job, int count)
{
    atomic_fetch_add(&job->ready, 1);
    while (atomic_load(&job->ready) < count)
        usleep(1000);
}

static void begin(struct job *job, bhvd_context *ctx)
{
    struct bhvd_error error;
    bhvd_context_first_loss(ctx, &error);
    CHECK(error.status == BHVD_OK && !error.cause);
    CHECK_STATUS(outcome_of_barrier(ctx, &error), BHVD_OK);
    wait_until_ready(job, RANKS);
}

// Waits until this many ranks have the subject's failure; none leaves before that, and some may be far behind.
static void expect_of_subject(struct job *job, bhvd_context *ctx, bhvd_status status, bhvd_cause cause, int hearing)
{
    expect(ctx, status, cause, job->subject);
    wait_until_ready(job, RANKS + hearing);
}

static void one_leaves(struct job *job, int rank, bhvd_context *ctx)
{
    begin(job, ctx);
    if (rank != job->subject)
        expect_of_subject(job, ctx, BHVD_ERR_SHUTDOWN, BHVD_CAUSE_LEFT, RANKS - 1);
}

// Its connections break without a goodbye, as when its process ends.
static void one_ends(struct job *job, int rank, bhvd_context *ctx)
{
    begin(job, ctx);
    if (rank != job->subject) {
        expect_of_subject(job, ctx, BHVD_ERR_PEER_LOST, BHVD_CAUSE_ENDED, RANKS - 1);
        return;
    }
    pthread_mutex_lock(&ctx->engine_lock);
    ctx->goodbye_sent = true;
    pthread_mutex_unlock(&ctx->engine_lock);
}

static void one_fails(struct job *job, int rank, bhvd_context *ctx)
{
    begin(job, ctx);
    if (rank != job->subject) {
        expect_of_subject(job, ctx, BHVD_ERR_SYSTEM, BHVD_CAUSE_FAILED, RANKS - 1);
        return;
    }
    pthread_mutex_lock(&ctx->engine_lock);
    executor_fail(&ctx->exec, BHVD_ERR_SYSTEM, "no memory for anything");
    pthread_mutex_unlock(&ctx->engine_lock);
    expect(ctx, BHVD_ERR_SYSTEM, BHVD_CAUSE_NONE, -1);
}

TEST(every_rank_hears_whose_failure_it_is)
{
    static void (*const bodies[])(struct job *, int, bhvd_context *) = {one_leaves, one_ends, one_fails};
    static const char *const transports[] = {"inproc", "shm", "tcp"};
    for (size_t t = 0; t < 3; t++) {
        for (size_t b = 0; b < 3; b++) {
            for (int subject = 0; subject < RANKS; subject += 2) {
                // In one process no connection breaks, and an unexpected message is read only when a rank waits for it.
                if (bodies[b] == one_ends && t == 0)
                    continue;
                struct job job = {.transport = transports[t], .body = bodies[b], .subject = subject};
                run_this_job(&job);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------- in virtual time

// Rank 1 leaves because rank 2 has; rank 0 posts only then.
TEST(the_first_rank_that_left_is_named)
{
    begin_job("ABC", 0, NULL);
    leave(2);
    expect(ranks[1].ctx, BHVD_ERR_SHUTDOWN, BHVD_CAUSE_LEFT, 2);
    leave(1);
    pass(1000 * MS);
    CHECK_EQ(ranks[0].ctx->coordinator->departed_count, 2);
    expect(ranks[0].ctx, BHVD_ERR_SHUTDOWN, BHVD_CAUSE_LEFT, 2);
    end_ranks();
}

// The coordinator has no memory for rank 1's request, which is its own failure, not that of rank 1.
TEST(a_lack_of_memory_is_not_a_peers_fault)
{
    begin_job("ABC", 0, NULL);
    lacks_memory = true;
    expect(ranks[1].ctx, BHVD_ERR_SYSTEM, BHVD_CAUSE_FAILED, 0);
    lacks_memory = false;
    expect(ranks[2].ctx, BHVD_ERR_SYSTEM, BHVD_CAUSE_FAILED, 0);
    expect(ranks[0].ctx, BHVD_ERR_SYSTEM, BHVD_CAUSE_NONE, -1);
    end_ranks();
}

static void set_path(int rank, struct bhvd_context_options *options)
{
    (void)rank;
    options->allreduce_path = "ring";
}

// Rank 1 stops after it and rank 0 have requested a sum, so rank 2 leaves in the middle of it: rank 0 waits for its values.
TEST(a_rank_that_leaves_in_the_middle_of_an_operation_has_left)
{
    enum { COUNT = 9000 };
    static float values[RANKS][COUNT];
    bhvd_handle *sums[RANKS];
    struct bhvd_error error;
    begin_job("ABC", 0, set_path);
    for (int r = 0; r < RANKS; r++) {
        if (r == 2) {
            pass(100 * MS);             // requested by the others
            add_fault(STOP, 1, NEVER);
        }
        sums[r] = post_sum(ranks[r].ctx, "sum", values[r], COUNT);
    }
    pass(500 * MS);
    CHECK(sums[0]->phase == OPERATION_EXECUTING && sums[2]->phase == OPERATION_EXECUTING);
    ranks[2].ctx->options.timeout_ms = 1000;        // it leaves with unfinished operations
    leave(2);
    pass(2000 * MS);
    CHECK_STATUS(bhvd_wait(sums[0], 0, &error), BHVD_ERR_PEER_LOST);
    CHECK(error.cause == BHVD_CAUSE_LEFT && error.rank == 2);
    for (int r = 0; r < RANKS; r++)
        bhvd_handle_drop(sums[r]);
    end_ranks();
}
