// Writes to shared memory go through the caches or past them, whichever is faster.
#include <stdlib.h>

#include "core/context/context.h"
#include "executor/shared.h"
#include "job.h"

enum { LONG = 64 << 10, SHORT = 1 << 10, WRITES = 1200, LONGEST = 300000 };

static int streamed;

static void copy_in_no_time(void *dst, const void *src, size_t nbytes)
{
    (void)dst, (void)src, (void)nbytes;
    streamed++;
}

static void copy_slowly(void *dst, const void *src, size_t nbytes)
{
    usleep(2000);
    memcpy(dst, src, nbytes);
    streamed++;
}

static int streamed_of(struct executor *exec, size_t nbytes, int writes)
{
    static unsigned char src[LONG], dst[LONG];
    streamed = 0;
    for (int i = 0; i < writes; i++)
        shared_put(exec, dst, src, nbytes);
    return streamed;
}

TEST(a_rank_writes_past_its_caches_while_that_is_quicker)
{
    struct executor *exec = calloc(1, sizeof *exec);
    kernel_table_init(&exec->kernels, 0);
    CHECK(!exec->kernels.streamed_copy);
    CHECK_EQ(streamed_of(exec, LONG, WRITES), 0);
    exec->kernels.streamed_copy = copy_in_no_time;
    CHECK(streamed_of(exec, LONG, WRITES) > WRITES / 4);
    CHECK(exec->writes.streamed);
    CHECK_EQ(streamed_of(exec, SHORT, WRITES), 0);
    exec->kernels.streamed_copy = copy_slowly;
    CHECK(streamed_of(exec, LONG, WRITES) < WRITES);
    CHECK(!exec->writes.streamed);
    const int looked_at = streamed_of(exec, LONG, WRITES);
    CHECK(looked_at > 0 && looked_at < WRITES / 20);
    free(exec);
}

// Small whole numbers, so that all sums are exact.
static float value_of(int rank, int64_t i) { return (float)(rank + i % 1000); }

static void run_kind(struct job *job, bhvd_context *ctx, int rank, int64_t count, double prescale)
{
    static const int root = 1;
    float *src = malloc((size_t)count * sizeof *src), *dst = calloc((size_t)count, sizeof *dst);
    for (int64_t i = 0; i < count; i++)
        src[i] = value_of(rank, i);
    char name[64];
    snprintf(name, sizeof name, "%d.%lld.%g", job->kind, (long long)count, prescale);
    const struct bhvd_args args = {
        .kind = job->kind, .name = name, .op = BHVD_OP_SUM, .root_rank = root, .prescale_factor = prescale};
    ctx->exec.writes = (struct writes){.streamed = true, .count = 100};    // far from the next measurement of both methods
    finish(post_floats(ctx, args, src, dst, count), BHVD_OK);
    const float total = (float)(RANKS * (RANKS - 1) / 2);
    for (int64_t i = 0; i < count; i++) {
        const float expected = job->kind == BHVD_BROADCAST ? value_of(root, i)
                                                           : (total + RANKS * (float)(i % 1000)) * (float)prescale;
        if (dst[i] != expected) {
            CHECK_EQ(dst[i], expected);
            break;
        }
    }
    free(src);
    free(dst);
}

static void all_sizes(struct job *job, int rank, bhvd_context *ctx)
{
    static const int64_t counts[] = {1, 1500, 5000, 70001, LONGEST};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        run_kind(job, ctx, rank, counts[i], 1.0);
        if (job->kind == BHVD_ALLREDUCE)
            run_kind(job, ctx, rank, counts[i], 2.0);
    }
}

TEST(what_is_written_past_the_caches_is_there_when_it_is_read)
{
    static const bhvd_kind kinds[] = {BHVD_ALLREDUCE, BHVD_BROADCAST};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        struct job job = {.transport = "inproc", .path = "", .body = all_sizes, .kind = kinds[i]};
        run_this_job(&job);
    }
}
