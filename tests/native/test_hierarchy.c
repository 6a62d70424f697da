// Hierarchical collectives with ranks as threads on simulated hosts: the placement of ranks, and, under the sanitizers, memory that
// the ranks of a host share while they drive sockets to other hosts.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "gather.h"
#include "core/context/context.h"
#include "executor/group.h"

enum { RANKS_MAX = 5, ROUNDS = 3 };

static const int64_t COUNTS[] = {1, 300, 5000, 200003};

struct rank {
    const char *hosts;              // a letter for each rank's host
    struct gathering *gathering;
    int rank, size;
    pthread_t thread;
};

static bhvd_handle *post(bhvd_context *ctx, bhvd_kind kind, int number, bhvd_op op, const float *src, float *dst, int64_t count)
{
    struct bhvd_tensor tensor = {.src = src, .dst = dst, .shape = &count, .ndim = 1, .dtype = BHVD_FLOAT32};
    char name[64];
    snprintf(name, sizeof name, "%d.%d.%lld", kind, number, (long long)count);
    struct bhvd_args args = {
        .kind = kind, .name = name, .tensors = &tensor, .tensor_count = 1, .op = op, .root_rank = 1,
        .prescale_factor = 1.0, .postscale_factor = 1.0, .device = -1, .blocking = number < 0};
    struct bhvd_error error;
    bhvd_handle *handle;
    CHECK_STATUS(bhvd_post(ctx, &args, &handle, &error), BHVD_OK);
    return handle;
}

static void finish(bhvd_handle *handle)
{
    struct bhvd_error error;
    CHECK_STATUS(bhvd_wait(handle, -1, &error), BHVD_OK);
    bhvd_handle_drop(handle);
}

static void run(bhvd_context *ctx, bhvd_kind kind, const float *src, float *dst, int64_t count)
{
    finish(post(ctx, kind, -1, BHVD_OP_SUM, src, dst, count));
}

static void check_all(const float *values, int64_t count, float expected)
{
    for (int64_t i = 0; i < count; i++) {
        if (values[i] != expected) {
            CHECK_EQ(values[i], expected);
            return;
        }
    }
}

static void check_shape(bhvd_context *ctx, const struct rank *r)
{
    const struct hierarchy *h = process_set_get(&ctx->sets, 0)->group.hierarchy;
    int members = 0, index = 0, host, found;
    for (int i = 0; i < r->size; i++) {
        index += i < r->rank && r->hosts[i] == r->hosts[r->rank];
        members += r->hosts[i] == r->hosts[r->rank];
    }
    CHECK_EQ(h->local->size, members);
    CHECK_EQ(h->index, index);
    CHECK_EQ(h->local->ranks[index], r->rank);
    CHECK_EQ(h->cross != NULL, index < h->shards);
    for (int i = 0; h->cross && i < h->hosts; i++) {
        hierarchy_find(h, h->cross->ranks[i], &host, &found);
        CHECK_EQ(host, i);
        CHECK_EQ(found, index);
    }
    size_t part[RANKS_MAX], total = 0;
    hierarchy_cut(h, 1000003 * sizeof(float), part);
    for (int i = 0; i < h->local->size; total += part[i++])
        CHECK_EQ(part[i] != 0, i < h->shards);
    CHECK_EQ(total, 1000003 * sizeof(float));
}

// Alternating sums and maxima are not fused: this exceeds the executions that may be in flight, and a link's queues.
static void check_many(bhvd_context *ctx, const struct rank *r, const float *src, float *dst, int64_t count)
{
    enum { MANY = 24 };
    bhvd_handle *handles[MANY];
    for (int i = 0; i < MANY; i++)
        handles[i] = post(ctx, BHVD_ALLREDUCE, i, i % 2 ? BHVD_OP_MAX : BHVD_OP_SUM, src, dst + i * count, count - i % 3);
    for (int i = 0; i < MANY; i++)
        finish(handles[i]);
    for (int i = 0; i < MANY; i++)
        check_all(dst + i * count, count - i % 3, (float)(i % 2 ? r->size : r->size * (r->size + 1) / 2));
}

static void *run_rank(void *arg)
{
    struct rank *r = arg;
    char host[64];
    snprintf(host, sizeof host, "hierarchy.%d.%c", getpid(), r->hosts[r->rank]);
    struct bhvd_context_options options = {
        .rank = r->rank, .size = r->size, .transport = "auto", .gather = gather,
        .user = &(struct gatherer){r->gathering, r->rank, r->size}, .listen_host = "127.0.0.1",
        .host_id = host, .fusion_threshold = 1 << 20,
        .cache_capacity = 16, .start_timeout_ms = 60000, .timeout_ms = 60000, .stall_warning_ms = 60000, .streams = 2,
    };
    struct bhvd_error error;
    bhvd_context *ctx;
    CHECK_STATUS(bhvd_context_create(&options, &ctx, &error), BHVD_OK);
    check_shape(ctx, r);
    const int64_t most = COUNTS[3] * RANKS_MAX;
    float *src = malloc((size_t)most * sizeof *src), *dst = malloc((size_t)most * sizeof *dst);
    const float sum = (float)(r->size * (r->size + 1) / 2);
    for (int round = 0; round < ROUNDS; round++) {
        for (size_t c = 0; c < sizeof COUNTS / sizeof COUNTS[0]; c++) {
            const int64_t count = COUNTS[c];
            for (int64_t i = 0; i < count * r->size; i++)
                src[i] = (float)(r->rank + 1);
            run(ctx, BHVD_ALLREDUCE, src, dst, count);
            check_all(dst, count, sum);
            run(ctx, BHVD_BROADCAST, src, dst, count);
            check_all(dst, count, 2);
            run(ctx, BHVD_ALLGATHER, src, dst, count);
            for (int i = 0; i < r->size; i++)
                check_all(dst + i * count, count, (float)(i + 1));
            run(ctx, BHVD_REDUCESCATTER, src, dst, count * r->size);
            check_all(dst, count, sum);
        }
        check_many(ctx, r, src, dst, 30000);
        check_many(ctx, r, src, dst, 5);
    }
    free(src);
    free(dst);
    bhvd_context_destroy(ctx);
    return NULL;
}

static void run_on(const char *hosts)
{
    struct rank ranks[RANKS_MAX];
    struct gathering gathering = {0};
    const int size = (int)strlen(hosts);
    for (int i = 0; i < size; i++) {
        ranks[i] = (struct rank){.hosts = hosts, .gathering = &gathering, .rank = i, .size = size};
        pthread_create(&ranks[i].thread, NULL, run_rank, &ranks[i]);
    }
    for (int i = 0; i < size; i++)
        pthread_join(ranks[i].thread, NULL);
}

TEST(equal_hosts) { run_on("AABB"); }
TEST(ranks_dealt_in_turn) { run_on("ABAB"); }
TEST(one_member_on_one_host) { run_on("ABBBB"); }
TEST(two_and_three_members) { run_on("AABBB"); }
