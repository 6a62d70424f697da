// Shared by the NCCL tests: bodies of jobs whose ranks have their own GPUs, with operations of every kind and known values, and
// faults of the fake NCCL. A test need not use all of it.
#pragma once

#include <sys/socket.h>

#include "core/context/context.h"
#include "gpu/nccl.h"
#include "gpu.h"

#pragma GCC diagnostic ignored "-Wunused-function"

enum { COUNT = 3000, ROUNDS = 3, KINDS = 8, STEPS_MAX = 100000 };

// Buffers on the GPU for the operations of one thread.
struct memory {
    float src[KINDS][RANKS * COUNT], dst[KINDS][RANKS * COUNT];
};

struct poster {
    bhvd_context *ctx;
    int rank, number;           // of the thread
    void *stream;
    struct memory *memory;
};

static bhvd_handle *post(const struct poster *p, struct bhvd_args args, void *src, void *dst, int64_t rows, bhvd_dtype dtype)
{
    const struct bhvd_tensor tensor = {.src = gpu_at(src), .dst = dst ? gpu_at(dst) : NULL, .shape = &rows, .ndim = 1,
                                       .dtype = dtype};
    struct bhvd_error error;
    bhvd_handle *handle;
    args.tensors = &tensor;
    args.tensor_count = 1;
    args.device = p->rank;
    args.gpu = gpus[p->rank].device;
    args.stream = p->stream;
    args.prescale_factor = args.postscale_factor = 1.0;
    CHECK_STATUS(bhvd_post(p->ctx, &args, &handle, &error), BHVD_OK);
    return handle;
}

// Posts an operation of each kind; a rank sends rank + 1 everywhere. The odd kinds take other paths: uneven parts, staging
// through the host, a mean.
static bhvd_handle *post_kind(const struct poster *p, int kind, const char *name)
{
    float *src = p->memory->src[kind], *dst = p->memory->dst[kind];
    static const int32_t splits[RANKS] = {COUNT, COUNT, COUNT};
    for (int i = 0; i < RANKS * COUNT; i++)
        src[i] = (float)(p->rank + 1);
    struct bhvd_args args = {.name = name, .op = BHVD_OP_SUM, .root_rank = 2};
    int64_t rows = COUNT;
    bhvd_dtype dtype = BHVD_FLOAT32;
    switch (kind) {
    case 0: args.kind = BHVD_ALLREDUCE; break;
    case 1: args.kind = BHVD_ALLREDUCE; args.op = BHVD_OP_AVERAGE; dst = src; break;
    case 2: args.kind = BHVD_ALLGATHER; rows = COUNT - p->rank; dst = NULL; break;
    case 3: args.kind = BHVD_BROADCAST; break;
    case 4: args.kind = BHVD_REDUCESCATTER; rows = COUNT + 1; break;
    case 5: args.kind = BHVD_REDUCESCATTER; args.op = BHVD_OP_AVERAGE; break;
    case 6: args.kind = BHVD_ALLTOALL; args.splits = splits; args.split_count = RANKS; rows = RANKS * COUNT; dst = NULL; break;
    case 7: args.kind = BHVD_ALLREDUCE; args.op = BHVD_OP_MAX; dtype = BHVD_INT16; break;
    }
    return post(p, args, src, dst, rows, dtype);
}

static void check_values(const float *values, int count, float expected)
{
    for (int i = 0; i < count; i++) {
        if (values[i] != expected)
            check_fail(__FILE__, __LINE__, "value %d is %g, not %g", i, (double)values[i], (double)expected);
    }
}

// Checks a result, on the GPU or on the host: `counts` values from every rank.
static void check_gathered(const struct poster *p, bhvd_handle *handle, float *dst, const int *counts)
{
    struct bhvd_result result;
    struct bhvd_error error;
    CHECK_STATUS(bhvd_result(handle, 0, &result), BHVD_OK);
    if (result.on_device) {
        CHECK_STATUS(bhvd_result_copy(handle, 0, gpu_at(dst), p->stream, &error), BHVD_OK);
        CHECK_EQ(driver.stream_synchronize(p->stream), 0);
    } else {
        memcpy(dst, result.data, result.nbytes);
    }
    for (int r = 0; r < RANKS; dst += counts[r++])
        check_values(dst, counts[r], (float)(r + 1));
}

static void check_kind(const struct poster *p, int kind, bhvd_handle *handle)
{
    float *dst = p->memory->dst[kind];
    struct bhvd_error error;
    CHECK_STATUS(bhvd_wait(handle, -1, &error), BHVD_OK);
    CHECK_STATUS(bhvd_handle_join(handle, p->stream, &error), BHVD_OK);
    if (kind == 2)
        check_gathered(p, handle, dst, (int[]){COUNT, COUNT - 1, COUNT - 2});
    if (kind == 6)
        check_gathered(p, handle, dst, (int[]){COUNT, COUNT, COUNT});
    CHECK_EQ(driver.stream_synchronize(p->stream), 0);
    switch (kind) {
    case 0: check_values(dst, COUNT, 6); break;
    case 1: check_values(p->memory->src[kind], COUNT, 2); break;
    case 3: check_values(dst, COUNT, 3); break;
    case 4: check_values(dst, COUNT / RANKS + (p->rank == 0), 6); break;
    case 5: check_values(dst, COUNT / RANKS, 2); break;
    }
    bhvd_handle_drop(handle);
}

static void *post_rounds(void *arg)
{
    struct poster *p = arg;
    p->memory = malloc(sizeof *p->memory);
    for (int round = 0; round < ROUNDS; round++) {
        bhvd_handle *handles[KINDS];
        for (int k = 0; k < KINDS; k++) {
            const int kind = (k * 3 + p->rank * 5) % KINDS;
            char name[32];
            snprintf(name, sizeof name, "op.%d.%d", p->number, kind);       // from the cache in the second round
            handles[kind] = post_kind(p, kind, name);
        }
        for (int kind = 0; kind < KINDS; kind++)
            check_kind(p, kind, handles[kind]);
        struct bhvd_error error;
        CHECK_STATUS(bhvd_context_wait_gpu(p->ctx, gpus[p->rank].device, &error), BHVD_OK);
    }
    free(p->memory);
    return NULL;
}

static void agree(bhvd_context *ctx, int rank)
{
    static float x[RANKS][4];
    const struct poster p = {.ctx = ctx, .rank = rank, .stream = gpus[rank].stream};
    finish(post(&p, (struct bhvd_args){.kind = BHVD_BROADCAST, .name = "agree"}, x[rank], x[rank], 4, BHVD_FLOAT32), BHVD_OK);
}

static void allreduce_ones(const struct poster *p, int id, const char *name, float *x, float expected)
{
    struct bhvd_error error;
    for (int i = 0; i < COUNT; i++)
        x[i] = 1;
    bhvd_handle *handle = post(p, (struct bhvd_args){.kind = BHVD_ALLREDUCE, .name = name, .op = BHVD_OP_SUM,
                                                     .process_set = id}, x, x, COUNT, BHVD_FLOAT32);
    CHECK_STATUS(bhvd_wait(handle, -1, &error), BHVD_OK);
    CHECK_STATUS(bhvd_handle_join(handle, p->stream, &error), BHVD_OK);
    CHECK_EQ(driver.stream_synchronize(p->stream), 0);
    check_values(x, COUNT, expected);
    bhvd_handle_drop(handle);
}

static bhvd_handle *post_control(bhvd_context *ctx, struct bhvd_args args)
{
    struct bhvd_error error;
    bhvd_handle *handle;
    args.device = -1;
    CHECK_STATUS(bhvd_post(ctx, &args, &handle, &error), BHVD_OK);
    return handle;
}

// Posts COUNT values in equal parts; the result goes to `out`, unless the core allocates it. May fail.
static bhvd_status try_to_post(const struct poster *p, bhvd_kind kind, const char *name, float *x, float *out,
                               bhvd_handle **handle, struct bhvd_error *error)
{
    static const int32_t splits[RANKS] = {COUNT / RANKS, COUNT / RANKS, COUNT / RANKS};
    const bool allocates = kind == BHVD_ALLGATHER || kind == BHVD_ALLTOALL;
    const int64_t shape[] = {COUNT};
    const struct bhvd_tensor tensor = {.src = gpu_at(x), .dst = allocates ? NULL : gpu_at(out), .shape = shape, .ndim = 1,
                                       .dtype = BHVD_FLOAT32};
    const struct bhvd_args args = {
        .kind = kind, .name = name, .tensors = &tensor, .tensor_count = 1, .op = BHVD_OP_SUM,
        .splits = kind == BHVD_ALLTOALL ? splits : NULL, .split_count = kind == BHVD_ALLTOALL ? RANKS : 0,
        .prescale_factor = 1.0, .postscale_factor = 1.0, .device = p->rank, .gpu = gpus[p->rank].device,
        .stream = p->stream};
    return bhvd_post(p->ctx, &args, handle, error);
}

// Posts operations of a kind until one fails; then the stream must not hang.
static bhvd_status steps_until_failure(const struct poster *p, bhvd_kind kind, float *x, struct bhvd_error *error)
{
    static float out[RANKS][COUNT];
    bhvd_status status = BHVD_OK;
    for (int step = 0; step < STEPS_MAX && !status; step++) {
        bhvd_handle *handle;
        status = try_to_post(p, kind, "step", x, out[p->rank], &handle, error);
        if (!status) {
            status = bhvd_wait(handle, -1, error);
            if (!status)
                status = bhvd_handle_join(handle, p->stream, error);
            bhvd_handle_drop(handle);
        }
    }
    CHECK(status);
    CHECK_EQ(driver.stream_synchronize(p->stream), 0);
    return status;
}

// Sets how the n-th group from now on fails in the fake NCCL.
static void fail_group(int n, const char *hangs)
{
    char text[16];
    gpu_load();
    snprintf(text, sizeof text, "%d", driver.nccl_groups() + n);
    setenv("BHVD_FAKE_NCCL_FAIL_AFTER", text, 1);
    setenv("BHVD_FAKE_NCCL_HANG", hangs, 1);
}

static void fail_no_group(void)
{
    unsetenv("BHVD_FAKE_NCCL_FAIL_AFTER");
    unsetenv("BHVD_FAKE_NCCL_HANG");
}

// Simulates a network failure.
static void cut_off(bhvd_context *ctx, int rank)
{
    for (int other = 0; other < RANKS; other++) {
        if (other != rank)
            shutdown(ctx->exec.connections.links[other].control.fd, SHUT_RDWR);
    }
}

// ------------------------------------------------------------------------------------------------------ bodies of jobs

// Two threads of every rank, each with its own stream, in different orders. On some ranks, operations are posted before the ranks
// have agreed, and are staged; NCCL still runs them.
static void every_collective(struct job *job, int rank, bhvd_context *ctx)
{
    struct poster posters[2] = {{.ctx = ctx, .rank = rank, .number = 0, .stream = gpus[rank].stream},
                                {.ctx = ctx, .rank = rank, .number = 1}};
    pthread_t thread;
    (void)job;
    gpu_enter(rank);
    CHECK_EQ(driver.stream_create(&posters[1].stream, 0), 0);
    gpu_leave();
    pthread_create(&thread, NULL, post_rounds, &posters[1]);
    post_rounds(&posters[0]);
    pthread_join(thread, NULL);
    CHECK_EQ(driver.stream_destroy(posters[1].stream), 0);
}

static void joins(struct job *job, int rank, bhvd_context *ctx)
{
    static float memory[RANKS][COUNT];
    const struct poster p = {.ctx = ctx, .rank = rank, .stream = gpus[rank].stream};
    (void)job;
    allreduce_ones(&p, 0, "first", memory[rank], RANKS);
    for (int step = 0; step < rank; step++)
        allreduce_ones(&p, 0, step ? "third" : "second", memory[rank], (float)(RANKS - 1 - step));
    finish(post_control(ctx, (struct bhvd_args){.kind = BHVD_JOIN, .name = "join"}), BHVD_OK);
}

// Handles are dropped, and the rank leaves the job, while the GPU is still running.
static void leaves_at_once(struct job *job, int rank, bhvd_context *ctx)
{
    static float memory[RANKS][4][COUNT];
    const struct poster p = {.ctx = ctx, .rank = rank, .stream = gpus[rank].stream};
    (void)job;
    agree(ctx, rank);
    for (int i = 0; i < 4; i++) {
        char name[32];
        snprintf(name, sizeof name, "op.%d", i);
        bhvd_handle *handle = post(&p, (struct bhvd_args){.kind = BHVD_ALLREDUCE, .name = name, .op = BHVD_OP_SUM},
                                   memory[rank][i], memory[rank][i], COUNT, BHVD_FLOAT32);
        struct bhvd_error error;
        if (i == 3)
            CHECK_STATUS(bhvd_wait(handle, -1, &error), BHVD_OK);
        bhvd_handle_drop(handle);
    }
}

static void nccl_fails(struct job *job, int rank, bhvd_context *ctx)
{
    static float memory[RANKS][COUNT];
    const struct poster p = {.ctx = ctx, .rank = rank, .stream = gpus[rank].stream};
    struct bhvd_error error;
    CHECK_STATUS(steps_until_failure(&p, job->kind, memory[rank], &error), BHVD_ERR_SYSTEM);
    CHECK_STR_CONTAINS(error.message, "NCCL 2.21.5 with CUDA 13.0 on GPU");
    CHECK_STR_CONTAINS(error.message, "remote process exited or there was a network error: the stand-in was told to fail");
}
