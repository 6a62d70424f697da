// The whole engine with n ranks as threads: every kind of operation, posted asynchronously and in different orders, over every
// transport. Checks values, and under the sanitizers ownership and data races.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/context/context.h"
#include "core/message/frame.h"
#include "core/message/id_range.h"
#include "core/negotiation/coordinator.h"
#include "core/negotiation/pairwise.h"
#include "job.h"

enum { COUNT = 5000, ROUNDS = 4, OPERATIONS = 24 };

static bhvd_status try_post(bhvd_context *ctx, bhvd_kind kind, const char *name, float *src, float *dst, int64_t count,
                            bhvd_handle **handle)
{
    struct bhvd_tensor tensor = {.src = src, .dst = dst, .shape = &count, .ndim = 1, .dtype = BHVD_FLOAT32};
    struct bhvd_args args = {
        .kind = kind, .name = name, .tensors = &tensor, .tensor_count = count >= 0, .op = BHVD_OP_SUM,
        .prescale_factor = 1.0, .postscale_factor = 1.0, .codec = BHVD_CODEC_MINMAX_UINT8, .topology = BHVD_TOPOLOGY_RING,
        .device = -1};
    struct bhvd_error error;
    return bhvd_post(ctx, &args, handle, &error);
}

static bhvd_handle *post(bhvd_context *ctx, bhvd_kind kind, const char *name, float *src, float *dst, int64_t count,
                         bhvd_status expected)
{
    bhvd_handle *handle;
    CHECK_STATUS(try_post(ctx, kind, name, src, dst, count, &handle), expected);
    return handle;
}

static void check_operation(int index, int rank, const float *dst, bhvd_handle *handle, int64_t count)
{
    struct bhvd_error error;
    struct bhvd_result result;
    CHECK_STATUS(bhvd_wait(handle, -1, &error), BHVD_OK);
    const float *values = dst;
    size_t n = (size_t)count;
    if (index % 5 == 1) {
        CHECK_STATUS(bhvd_result(handle, 0, &result), BHVD_OK);
        values = result.data;
        CHECK_EQ(result.dim0, RANKS * count);
    }
    if (index % 5 == 3)
        n = (size_t)(count / RANKS + (rank < count % RANKS));
    float expected = index % 5 == 2 ? 1.0f : index % 5 == 1 ? 1.0f : 6.0f;
    for (size_t i = 0; i < n; i++) {
        // C_LP_S of a constant chunk is exact
        if (values[i] != expected) {
            CHECK_EQ(values[i], expected);
            break;
        }
    }
    bhvd_handle_drop(handle);
}

// Kinds 0 to 4 by index: allreduce, allgather, broadcast (root 0), reducescatter, C_LP_S. Rank r sends r + 1 everywhere.
static void mixed_operations(struct job *job, int rank, bhvd_context *ctx)
{
    static const bhvd_kind kinds[] = {BHVD_ALLREDUCE, BHVD_ALLGATHER, BHVD_BROADCAST, BHVD_REDUCESCATTER, BHVD_C_LP_S};
    float *src = malloc(COUNT * sizeof *src), *dst = malloc(OPERATIONS * COUNT * sizeof *dst);
    (void)job;
    for (int i = 0; i < COUNT; i++)
        src[i] = (float)(rank + 1);
    for (int round = 0; round < ROUNDS; round++) {
        bhvd_handle *handles[OPERATIONS];
        for (int k = 0; k < OPERATIONS; k++) {
            int index = (k * 7 + rank * 5) % OPERATIONS;        // 7 is coprime to 24: a different order on every rank
            char name[32];
            snprintf(name, sizeof name, "op.%d.%d", index, round / 2);      // each name twice: the second time from the cache
            float *out = index % 5 == 1 ? NULL : dst + index * COUNT;
            handles[index] = post(ctx, kinds[index % 5], name, src, out, COUNT - index, BHVD_OK);
        }
        for (int index = 0; index < OPERATIONS; index++)
            check_operation(index, rank, dst + index * COUNT, handles[index], COUNT - index);
    }
    free(src);
    free(dst);
}

static void mismatch_then_agreement(struct job *job, int rank, bhvd_context *ctx)
{
    float x[8] = {0};
    (void)job;
    finish(post(ctx, BHVD_ALLREDUCE, "a", x, x, rank == 1 ? 7 : 8, BHVD_OK), BHVD_ERR_MISMATCH);
    finish(post(ctx, rank == 2 ? BHVD_BROADCAST : BHVD_ALLREDUCE, "b", x, x, 8, BHVD_OK), BHVD_ERR_MISMATCH);
    // The operation stays in progress on rank 0 until rank 1 posts it, after the barrier.
    bhvd_handle *first = rank == 1 ? NULL : post(ctx, BHVD_ALLREDUCE, "c", x, x, 8, BHVD_OK);
    if (rank == 0)
        post(ctx, BHVD_ALLREDUCE, "c", x, x, 8, BHVD_ERR_ARGUMENT);
    finish(post(ctx, BHVD_BARRIER, "go", NULL, NULL, -1, BHVD_OK), BHVD_OK);
    finish(first ? first : post(ctx, BHVD_ALLREDUCE, "c", x, x, 8, BHVD_OK), BHVD_OK);
    finish(post(ctx, BHVD_ALLREDUCE, "a", x, x, 8, BHVD_OK), BHVD_OK);
}

static void joins(struct job *job, int rank, bhvd_context *ctx)
{
    (void)job;
    for (int round = 0; round < 3; round++) {
        float x[8] = {1, 1, 1, 1, 1, 1, 1, 1};
        for (int i = 0; i < rank + 1; i++)
            finish(post(ctx, BHVD_ALLREDUCE, i == 0 ? "first" : i == 1 ? "second" : "third", x, x, 8, BHVD_OK), BHVD_OK);
        bhvd_handle *join = post(ctx, BHVD_JOIN, "join", NULL, NULL, -1, BHVD_OK);
        struct bhvd_error error;
        CHECK_STATUS(bhvd_wait(join, -1, &error), BHVD_OK);
        CHECK_EQ(bhvd_handle_value(join), RANKS - 1);
        bhvd_handle_drop(join);
        CHECK_EQ(x[0], rank == 0 ? 3.0f : 6.0f);          // 1+1+1, then 0+3+3, then 0+0+6
    }
}

// Rank 0 adds a process set of ranks 0 and 2, which only these request; rank 2 has joined, or joins at the same time.
static void adds_a_set_with_a_joined_rank(struct job *job, int rank, bhvd_context *ctx)
{
    const int32_t members[] = {0, 2};
    bhvd_handle *add;
    struct bhvd_error error;
    (void)job;
    if (rank == 0) {
        struct bhvd_args args = {.kind = BHVD_PROCESS_SET_ADD, .name = "members", .splits = members, .split_count = 2,
                                 .root_rank = 1, .device = -1};
        CHECK_STATUS(bhvd_post(ctx, &args, &add, &error), BHVD_OK);
        finish(add, BHVD_ERR_UNSUPPORTED);
    }
    finish(post(ctx, BHVD_JOIN, "join", NULL, NULL, -1, BHVD_OK), BHVD_OK);
}

static void one_leaves_early(struct job *job, int rank, bhvd_context *ctx)
{
    float x[8] = {0};
    (void)job;
    finish(post(ctx, BHVD_ALLREDUCE, "a", x, x, 8, BHVD_OK), BHVD_OK);
    if (rank == 2)
        return;
    // Rank 1 learns of it while it waits, or, if rank 0 has learned of it and left, before it posts.
    bhvd_handle *handle;
    bhvd_status status = try_post(ctx, BHVD_ALLREDUCE, "b", x, x, 8, &handle);
    if (status == BHVD_OK)
        finish(handle, BHVD_ERR_SHUTDOWN);
    else
        CHECK_STATUS(status, BHVD_ERR_SHUTDOWN);
}

// ------------------------------------------------------------------------------------------------- pairwise averages

static bhvd_handle *average(bhvd_context *ctx, const char *name, float *values, int64_t count)
{
    return post(ctx, BHVD_D_FP_S, name, values, values, count, BHVD_OK);
}

// A pairwise average with changing arguments is revoked each time.
static void agrees_again_and_again(struct job *job, int rank, bhvd_context *ctx)
{
    enum { CHANGES = 20, TIMES = 4 };
    float x[CHANGES + 1] = {0};
    (void)job;
    for (int change = 0; change < CHANGES; change++)
        for (int i = 0; i < TIMES; i++)
            finish(average(ctx, "changes", x, 1 + change), BHVD_OK);
    finish(post(ctx, BHVD_BARRIER, "all", NULL, NULL, -1, BHVD_OK), BHVD_OK);
    if (rank == 0) {
        pthread_mutex_lock(&ctx->engine_lock);
        CHECK_EQ(ctx->pairwise->count, 1);
        pthread_mutex_unlock(&ctx->engine_lock);
    }
    finish(post(ctx, BHVD_BARRIER, "looked", NULL, NULL, -1, BHVD_OK), BHVD_OK);
}

// A join revokes all pairwise averages, so that new ones can be made.
static void agrees_before_each_join(struct job *job, int rank, bhvd_context *ctx)
{
    float x[4] = {0};
    (void)job;
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 4; i++)
            finish(average(ctx, "x", x, 4), BHVD_OK);
        finish(post(ctx, BHVD_JOIN, "join", NULL, NULL, -1, BHVD_OK), BHVD_OK);
        if (rank == 0) {
            pthread_mutex_lock(&ctx->engine_lock);
            CHECK_EQ(ctx->pairwise->count, 0);
            CHECK_EQ(process_set_get(&ctx->sets, 0)->pairwise_count, 0);
            pthread_mutex_unlock(&ctx->engine_lock);
        }
        finish(post(ctx, BHVD_BARRIER, "looked", NULL, NULL, -1, BHVD_OK), BHVD_OK);
    }
}

// Operations that start alone do not wait until no average is in flight.
static void averages_without_a_pause(struct job *job, int rank, bhvd_context *ctx)
{
    enum { NAMES = 4, LONG = 20000, LEAST = 30, MOST = 4000 };
    float *x = calloc(NAMES * LONG, sizeof *x);
    bhvd_handle *handles[NAMES], *barrier = NULL;
    char name[NAMES][8];
    int turns = 0;
    for (int i = 0; i < NAMES; i++) {
        snprintf(name[i], sizeof name[i], "x%d", i);
        handles[i] = average(ctx, name[i], x + i * LONG, LONG);
    }
    for (; turns < MOST; turns++) {
        const int i = turns % NAMES;
        finish(handles[i], BHVD_OK);
        handles[i] = average(ctx, name[i], x + i * LONG, LONG);
        if (turns == LEAST)
            barrier = post(ctx, BHVD_BARRIER, "alone", NULL, NULL, -1, BHVD_OK);
        // All stop at the same round, which none has reached.
        int stop = atomic_load(&job->ready);
        struct bhvd_error error;
        if (stop && turns == stop)
            break;
        if (!stop && turns > LEAST && bhvd_wait(barrier, 0, &error) == BHVD_OK)
            atomic_compare_exchange_strong(&job->ready, &stop, turns + 4 * NAMES);
    }
    CHECK(turns < MOST);
    (void)rank;
    for (int i = 0; i < NAMES; i++)
        finish(handles[i], BHVD_OK);
    finish(barrier, BHVD_OK);
    free(x);
}

// Rank 0 changes the arguments of a pairwise average. job->subject posts after the others have posted or have been rejected.
static void is_refused_once(struct job *job, int rank, bhvd_context *ctx)
{
    float x[4] = {0};
    for (int i = 0; i < 3; i++)
        finish(average(ctx, "x", x, 4), BHVD_OK);
    finish(post(ctx, BHVD_BARRIER, "all", NULL, NULL, -1, BHVD_OK), BHVD_OK);
    while (rank == job->subject && atomic_load(&job->ready) < RANKS - 1)
        usleep(1000);
    bhvd_handle *handle = average(ctx, "x", x, rank == 0 ? 3 : 4);
    atomic_fetch_add(&job->ready, job->subject == 0);
    finish(handle, BHVD_ERR_MISMATCH);
    atomic_fetch_add(&job->ready, job->subject != 0);
    for (int i = 0; i < 4; i++) {
        x[0] = (float)(100 + rank);
        finish(average(ctx, "x", x, 4), BHVD_OK);
        CHECK_EQ(x[0], 101);
    }
}

// Rank 2 has joined; ranks 0 and 1 request a sum, one after the other, with the name of a pairwise average.
static void sums_what_was_averaged(struct job *job, int rank, bhvd_context *ctx)
{
    float x[4] = {1};
    (void)job;
    for (int i = 0; i < 3; i++)
        finish(average(ctx, "x", x, 4), BHVD_OK);
    finish(post(ctx, BHVD_BARRIER, "all", NULL, NULL, -1, BHVD_OK), BHVD_OK);
    usleep((useconds_t)(rank < 2 ? 50000 + rank * 100000 : 0));
    if (rank < 2) {
        finish(post(ctx, BHVD_ALLREDUCE, "x", x, x, 4, BHVD_OK), BHVD_OK);
        CHECK_EQ(x[0], 2);
    }
    finish(post(ctx, BHVD_JOIN, "join", NULL, NULL, -1, BHVD_OK), BHVD_OK);
}

// Rank 0 has no memory for the signal to a neighbor: all operations end, those posted with this one and dropped already, too.
static void has_no_memory_for_a_signal(struct job *job, int rank, bhvd_context *ctx)
{
    float x[8] = {0};
    struct bhvd_error error;
    for (int i = 0; i < 3; i++)
        finish(average(ctx, "x", x, 4), BHVD_OK);
    finish(post(ctx, BHVD_BARRIER, "all", NULL, NULL, -1, BHVD_OK), BHVD_OK);
    atomic_fetch_add(&job->ready, rank != 0);
    while (rank == 0 && atomic_load(&job->ready) < RANKS - 1)
        usleep(1000);
    if (rank == 0) {
        pthread_mutex_lock(&ctx->engine_lock);
        ctx->exec.connections.links[1].control_out.failed = true;
        bhvd_handle_drop(average(ctx, "x", x, 4));
        bhvd_handle_drop(average(ctx, "y", x + 4, 4));
        pthread_mutex_unlock(&ctx->engine_lock);
        for (bool ended = false; !ended; usleep(1000)) {
            pthread_mutex_lock(&ctx->engine_lock);
            ended = ctx->exec.failure.status == BHVD_ERR_SYSTEM && ctx->outstanding == 0;
            pthread_mutex_unlock(&ctx->engine_lock);
        }
        atomic_fetch_add(&job->ready, 1);
    }
    while (atomic_load(&job->ready) < RANKS)
        usleep(1000);
    if (rank) {
        bhvd_handle *handle;
        if (try_post(ctx, BHVD_BARRIER, "none", NULL, NULL, -1, &handle) == BHVD_OK) {
            CHECK(bhvd_wait(handle, -1, &error) != BHVD_OK);
            bhvd_handle_drop(handle);
        }
    }
}

TEST(no_memory_for_a_signal_ends_all_operations) { run_job("tcp", "", NULL, has_no_memory_for_a_signal); }

// Rank 1 requests unknown ids and never replies to the questions about them.
static void floods_with_unknown_ids(struct job *job, int rank, bhvd_context *ctx)
{
    while (rank && !job->ready)
        usleep(1000);
    if (rank)
        return;
    struct bytes items = {0};
    bytes_put_u8(&items, ITEM_CACHED);
    bytes_put_u32(&items, 1000);
    bytes_put_u32(&items, ID_RANGE_MAX);
    pthread_mutex_lock(&ctx->engine_lock);
    CHECK_STATUS(coordinator_on_requests(ctx, (int[]){1}, 1, bytes_read(&items)), BHVD_OK);
    CHECK_STATUS(coordinator_on_requests(ctx, (int[]){1}, 1, bytes_read(&items)), BHVD_ERR_SYSTEM);
    CHECK_EQ(ctx->exec.failure.rank, 1);
    pthread_mutex_unlock(&ctx->engine_lock);
    bytes_fini(&items);
    job->ready = 1;
}

TEST(unknown_ids_without_bound_break_the_protocol) { run_job("tcp", "", NULL, floods_with_unknown_ids); }

TEST(a_sum_with_a_joined_rank_takes_the_name_of_an_average) { run_job("tcp", "", NULL, sums_what_was_averaged); }

TEST(a_late_rank_is_refused_what_the_others_were)
{
    for (int late = 0; late < RANKS; late++) {
        struct job job = {.transport = "tcp", .path = "", .body = is_refused_once, .subject = late};
        run_this_job(&job);
    }
}

TEST(a_pairwise_average_that_changes_is_given_back) { run_job("tcp", "", NULL, agrees_again_and_again); }
TEST(pairwise_averages_are_given_back_in_a_join) { run_job("tcp", "", NULL, agrees_before_each_join); }
TEST(pairwise_averages_do_not_keep_others_from_starting) { run_job("tcp", "", NULL, averages_without_a_pause); }

TEST(mixed_operations_on_every_path) { on_every_path(mixed_operations); }
TEST(the_job_goes_on_after_a_mismatch) { on_every_path(mismatch_then_agreement); }
TEST(joined_ranks_contribute_zeros) { on_every_path(joins); }
TEST(a_process_set_is_not_added_with_a_joined_member) { run_job("tcp", "", NULL, adds_a_set_with_a_joined_rank); }
TEST(an_operation_that_needs_a_rank_that_left) { on_every_path(one_leaves_early); }
