// A wait while other work makes continuous progress, such as requests of other ranks to the coordinator.
#include "core/engine/engine.h"

static _Thread_local bool moves_without_end;

static bool poll_and_move(bhvd_context *ctx, bool poll_sockets) { return engine_poll(ctx, poll_sockets) || moves_without_end; }

#define engine_poll poll_and_move
#include "core/api/progress.c"
#undef engine_poll

#include "core/negotiation/coordinator.h"
#include "job.h"

enum { WAIT_MS = 20, WAITS = 5, LATE_MS = 5000 };

static void waits_for_late_ranks(struct job *job, int rank, bhvd_context *ctx)
{
    struct bhvd_error error;
    for (int i = 0; rank && i < LATE_MS && !atomic_load(&job->ready); i++)
        usleep(1000);
    bhvd_handle *handle = post_barrier(ctx, "barrier");
    moves_without_end = true;
    for (int i = 0; rank == 0 && i < WAITS; i++)
        CHECK_STATUS(bhvd_wait(handle, WAIT_MS, &error), BHVD_IN_PROGRESS);
    moves_without_end = false;
    atomic_store(&job->ready, 1);
    finish(handle, BHVD_OK);
}

static void looks_at_stalls(struct job *job, int rank, bhvd_context *ctx)
{
    while (rank && !atomic_load(&job->ready))
        usleep(1000);
    bhvd_handle *handle = post_barrier(ctx, "barrier");
    if (rank == 0) {
        pthread_mutex_lock(&ctx->engine_lock);
        ctx->coordinator->next_stall_check_ns = 0;
        for (int i = 0; i < 1000; i++)
            engine_poll(ctx, false);
        CHECK(ctx->coordinator->next_stall_check_ns);
        pthread_mutex_unlock(&ctx->engine_lock);
        atomic_store(&job->ready, 1);
    }
    finish(handle, BHVD_OK);
}

TEST(a_wait_ends_when_its_time_is_over) { run_job("inproc", "", NULL, waits_for_late_ranks); }
TEST(stalls_are_looked_for) { run_job("inproc", "", NULL, looks_at_stalls); }
