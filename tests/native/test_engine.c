// The whole engine with n ranks as threads: every kind of operation, posted asynchronously and in different orders, over every
// transport. Checks values, and under the sanitizers ownership and data races.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/context/context.h"
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

static void has_no_memory_for_its_request(struct job *job, int rank, bhvd_context *ctx)
{
    float x[8] = {0};
    struct bhvd_error error;
    (void)job;
    if (rank == 1)
        ctx->request_frame.failed = true;
    bhvd_handle *handle;
    bhvd_status status = try_post(ctx, BHVD_ALLREDUCE, "a", x, x, 8, &handle);
    if (status == BHVD_OK) {
        status = bhvd_wait(handle, 20000, &error);
        bhvd_handle_drop(handle);
    }
    CHECK(status == BHVD_ERR_SYSTEM || status == BHVD_ERR_PEER_LOST || status == BHVD_ERR_SHUTDOWN);
}

TEST(mixed_operations_on_every_path) { on_every_path(mixed_operations); }
TEST(the_job_goes_on_after_a_mismatch) { on_every_path(mismatch_then_agreement); }
TEST(joined_ranks_contribute_zeros) { on_every_path(joins); }
TEST(a_process_set_is_not_added_with_a_joined_member) { run_job("tcp", "", NULL, adds_a_set_with_a_joined_rank); }
TEST(an_operation_that_needs_a_rank_that_left) { on_every_path(one_leaves_early); }
TEST(a_rank_without_memory_for_its_request_ends_the_job) { run_job("tcp", "", NULL, has_no_memory_for_its_request); }
