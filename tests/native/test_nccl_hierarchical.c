// NCCL within hosts and the CPU transports between them (native/gpu/nccl_hierarchical.c), tested like NCCL alone in test_nccl.c.
// Hosts are simulated by host ids.
#include "gpu_jobs.h"

static void in_two_levels(int rank, struct bhvd_context_options *options)
{
    (void)rank;
    options->nccl_hierarchical = HIERARCHICAL_ONLY;
}

// An allreduce longer than several pieces, with one shard.
static void several_pieces(struct job *job, int rank, bhvd_context *ctx)
{
    enum { LONG = 2100001 };
    const struct poster p = {.ctx = ctx, .rank = rank, .stream = gpus[rank].stream};
    float *x = malloc(LONG * sizeof *x), *sums = malloc(LONG * sizeof *sums);
    (void)job;
    for (int i = 0; i < LONG; i++)
        x[i] = (float)(i % 7 + rank);
    const int groups = driver.nccl_groups();
    bhvd_handle *handle = post(&p, (struct bhvd_args){.kind = BHVD_ALLREDUCE, .name = "long", .op = BHVD_OP_SUM}, x, sums, LONG,
                               BHVD_FLOAT32);
    struct bhvd_error error;
    CHECK_STATUS(bhvd_wait(handle, -1, &error), BHVD_OK);
    CHECK_STATUS(bhvd_context_wait_gpu(ctx, gpus[rank].device, &error), BHVD_OK);
    CHECK(driver.nccl_groups() - groups >= 6);
    bhvd_handle_drop(handle);
    for (int i = 0; i < LONG; i++) {
        if (sums[i] != (float)(RANKS * (i % 7) + RANKS * (RANKS - 1) / 2))
            check_fail(__FILE__, __LINE__, "value %d is %g", i, (double)sums[i]);
    }
    free(x);
    free(sums);
}

// The host is cut off while the others wait for it, on the GPU or on the network.
static void a_host_is_lost(struct job *job, int rank, bhvd_context *ctx)
{
    static float memory[RANKS][2][COUNT];
    float *x = memory[rank][0];
    const struct poster p = {.ctx = ctx, .rank = rank, .stream = gpus[rank].stream};
    struct bhvd_error error;
    bhvd_handle *handle;
    agree(ctx, rank);
    allreduce_ones(&p, 0, "before", x, RANKS);
    CHECK_STATUS(try_to_post(&p, job->kind, "hangs", x, memory[rank][1], &handle, &error), BHVD_OK);
    atomic_fetch_add(&job->ready, 1);
    if (rank == job->subject) {
        while (atomic_load(&job->ready) < RANKS)
            sched_yield();
        cut_off(ctx, rank);
    }
    // Operations other than sums end if they wait for no hanging rank. So does an enqueued operation of a member without a
    // shard, before or after the loss is known.
    const bool sums = job->kind == BHVD_ALLREDUCE, has_shard = rank != 1;
    bhvd_status status = bhvd_wait(handle, -1, &error);
    CHECK(status == BHVD_ERR_PEER_LOST || (status == BHVD_OK && !(sums && has_shard)));
    bhvd_handle_drop(handle);
    status = bhvd_context_wait_gpu(ctx, gpus[rank].device, &error);
    CHECK(status == BHVD_ERR_PEER_LOST || (status == BHVD_OK && !sums));
    CHECK_STATUS(steps_until_failure(&p, job->kind, x, &error), BHVD_ERR_PEER_LOST);
}

TEST(every_collective_in_two_levels)
{
    run_on_gpus((struct job){.transport = "auto", .hosts = "AAB", .body = every_collective, .adjust = in_two_levels});
    run_on_gpus((struct job){.transport = "auto", .hosts = "ABA", .body = joins, .adjust = in_two_levels});
    run_on_gpus((struct job){.transport = "auto", .hosts = "ABB", .body = leaves_at_once, .adjust = in_two_levels});
}

TEST(a_vector_of_several_pieces)
{
    run_on_gpus((struct job){.transport = "auto", .hosts = "ABA", .body = several_pieces, .adjust = in_two_levels});
}

static const bhvd_kind kinds[] = {BHVD_ALLREDUCE, BHVD_BROADCAST};
enum { KINDS_TRIED = sizeof kinds / sizeof kinds[0] };

TEST(an_error_of_nccl_within_a_host)
{
    for (int k = 0; k < KINDS_TRIED; k++) {
        fail_group(20, "0");
        run_on_gpus((struct job){.transport = "auto", .hosts = "AAB", .body = nccl_fails, .adjust = in_two_levels, .kind = kinds[k]});
    }
    fail_no_group();
}

TEST(a_lost_host_leaves_no_stream_hanging)
{
    for (int k = 0; k < KINDS_TRIED; k++) {
        fail_group(3 * RANKS + 1, "1");         // after the broadcast's and two of the first allreduce
        run_on_gpus((struct job){.transport = "auto", .hosts = "AAB", .body = a_host_is_lost, .adjust = in_two_levels, .subject = 2,
                                 .kind = kinds[k]});
    }
    fail_no_group();
}
