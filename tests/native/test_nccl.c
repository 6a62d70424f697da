// NCCL collectives of tensors on GPUs (native/gpu/nccl.c, nccl_execution.c), also under the sanitizers.
// Ranks are threads, each with its own GPU; driver and NCCL are fakes. Tests ownership, data races, and the state after failures;
// tests/device/test_nccl.py tests more values.
#include "gpu_jobs.h"

static void a_second_process_set(struct job *job, int rank, bhvd_context *ctx)
{
    static float memory[RANKS][COUNT];
    static const int32_t members[] = {0, 2};
    const struct poster p = {.ctx = ctx, .rank = rank, .stream = gpus[rank].stream};
    struct bhvd_error error;
    (void)job;
    for (int round = 0; round < 2; round++) {
        bhvd_handle *add = post_control(ctx, (struct bhvd_args){.kind = BHVD_PROCESS_SET_ADD, .name = "add", .splits = members,
                                                                .split_count = 2});
        CHECK_STATUS(bhvd_wait(add, -1, &error), BHVD_OK);
        const int id = (int)bhvd_handle_value(add);
        bhvd_handle_drop(add);
        allreduce_ones(&p, 0, "all", memory[rank], RANKS);
        if (rank != 1)
            allreduce_ones(&p, id, "part", memory[rank], 2);
        finish(post_control(ctx, (struct bhvd_args){.kind = BHVD_PROCESS_SET_REMOVE, .name = "remove", .root_rank = id}),
               BHVD_OK);
    }
}

// The others' GPUs wait for an operation that one rank's GPU never runs, and that rank's connections are cut.
static void a_rank_is_lost(struct job *job, int rank, bhvd_context *ctx)
{
    static float memory[RANKS][COUNT];
    const struct poster p = {.ctx = ctx, .rank = rank, .stream = gpus[rank].stream};
    struct bhvd_error error;
    agree(ctx, rank);
    allreduce_ones(&p, 0, "before", memory[rank], RANKS);
    CHECK_STATUS(bhvd_context_wait_gpu(ctx, gpus[rank].device, &error), BHVD_OK);
    finish(post(&p, (struct bhvd_args){.kind = BHVD_ALLREDUCE, .name = "hangs", .op = BHVD_OP_SUM}, memory[rank], memory[rank],
                COUNT, BHVD_FLOAT32), BHVD_OK);
    atomic_fetch_add(&job->ready, 1);
    if (rank == job->subject) {
        while (atomic_load(&job->ready) < RANKS)
            sched_yield();
        cut_off(ctx, rank);
    }
    // All operations have completed, but not their work on the GPU.
    CHECK_STATUS(bhvd_context_wait_gpu(ctx, gpus[rank].device, &error), BHVD_ERR_PEER_LOST);
    CHECK_STR_CONTAINS(error.message, "was lost");
    CHECK_STATUS(steps_until_failure(&p, BHVD_ALLREDUCE, memory[rank], &error), BHVD_ERR_PEER_LOST);
}

TEST(every_collective_by_nccl)
{
    run_on_gpus((struct job){.transport = "inproc", .body = every_collective});
    run_on_gpus((struct job){.transport = "shm", .body = every_collective});
    run_on_gpus((struct job){.transport = "tcp", .body = every_collective});
}

TEST(process_sets) { run_on_gpus((struct job){.transport = "inproc", .body = a_second_process_set}); }
TEST(joined_ranks_contribute_zeros) { run_on_gpus((struct job){.transport = "shm", .body = joins}); }
TEST(leaving_while_the_gpu_works) { run_on_gpus((struct job){.transport = "tcp", .body = leaves_at_once}); }

TEST(an_error_of_nccl)
{
    fail_group(10, "0");
    run_on_gpus((struct job){.transport = "shm", .body = nccl_fails});
    fail_no_group();
}

TEST(a_lost_rank_leaves_no_stream_hanging)
{
    fail_group(2 * RANKS + 1, "1");     // after those of the broadcast and the first allreduce
    run_on_gpus((struct job){.transport = "tcp", .body = a_rank_is_lost, .subject = 2});
    fail_no_group();
}
