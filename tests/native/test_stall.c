// Stalls as fields: rank 0 reports operations for which the others wait, until the missing rank has requested them.
#include "job.h"

enum { LATE = 2, OPERATIONS = BHVD_STALLED_NAMES + 1 };

static void impatient(int rank, struct bhvd_context_options *options)
{
    (void)rank;
    options->stall_warning_ms = 100;
}

static void post_all(bhvd_context *ctx, bhvd_handle **handles)
{
    for (int i = 0; i < OPERATIONS; i++) {
        char name[200];
        snprintf(name, sizeof name, "%d, [%0150d]", i, i);
        handles[i] = post_barrier(ctx, name);
    }
}

static void one_is_late(struct job *job, int rank, bhvd_context *ctx)
{
    struct bhvd_stalled stalled[RANKS] = {{0}};
    bhvd_handle *handles[OPERATIONS];
    CHECK_EQ(bhvd_context_stalled(ctx, stalled, RANKS), 0);
    while (rank == LATE && job->ready == 0)
        usleep(1000);
    post_all(ctx, handles);
    if (rank == 0) {
        while (bhvd_context_stalled(ctx, stalled, RANKS) == 0 || stalled[0].operations < OPERATIONS)
            usleep(1000);
        CHECK_EQ(bhvd_context_stalled(ctx, stalled, RANKS), 1);
        CHECK_EQ(stalled[0].rank, LATE);
        CHECK_EQ(stalled[0].operations, OPERATIONS);
        for (int i = 0; i < BHVD_STALLED_NAMES; i++) {
            CHECK_EQ(strlen(stalled[0].names[i]), sizeof stalled[0].names[i] - 1);
            CHECK_STR_CONTAINS(stalled[0].names[i], ", [000000");
        }
        CHECK_EQ(bhvd_context_stalled(ctx, stalled, 0), 0);
        job->ready = 1;
    }
    for (int i = 0; i < OPERATIONS; i++)
        finish(handles[i], BHVD_OK);
    while (rank == 0 && bhvd_context_stalled(ctx, stalled, RANKS))
        usleep(1000);
    CHECK_EQ(bhvd_context_stalled(ctx, stalled, RANKS), 0);
}

TEST(who_stalls_is_told_in_fields)
{
    static const char *const transports[] = {"inproc", "tcp"};
    for (size_t t = 0; t < 2; t++) {
        struct job job = {.transport = transports[t], .body = one_is_late, .adjust = impatient};
        run_this_job(&job);
    }
}
