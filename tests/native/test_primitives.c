// The primitives with n ranks as threads, several in progress at once and in a different order on every rank, over every
// transport: tests ownership and data races under the sanitizers. tests/primitives tests all values.
#include <stdio.h>
#include <stdlib.h>

#include "job.h"
#include "kernel/segments.h"
#include "transport/link.h"

enum {
    COUNT = (1 << 18) + 1001,       // two segments of each kind, in a vector of three tensors
    ROUNDS = 3,
    KINDS = 7
};

struct memory {
    float *values, *out[KINDS], *worker_residual, *server_residual, *replicas[3], *of_hosts[3];
};

static float *floats(size_t count, float value)
{
    float *array = malloc(count * sizeof *array);
    for (size_t i = 0; i < count; i++)
        array[i] = value;
    return array;
}

static struct memory memory_create(float value)
{
    struct memory m = {.values = floats(COUNT, value), .worker_residual = floats(COUNT, 0), .server_residual = floats(COUNT, 0)};
    for (int i = 0; i < KINDS; i++)
        m.out[i] = floats(COUNT, -1);
    for (int i = 0; i < 3; i++) {
        m.replicas[i] = floats(COUNT, 0);
        m.of_hosts[i] = floats(COUNT, 0);
    }
    return m;
}

static void memory_destroy(struct memory *m)
{
    free(m->values);
    free(m->worker_residual);
    free(m->server_residual);
    for (int i = 0; i < KINDS; i++)
        free(m->out[i]);
    for (int i = 0; i < 3; i++) {
        free(m->replicas[i]);
        free(m->of_hosts[i]);
    }
}

// Kinds 0 to 3: C_LP_S with either method, D_FP_S, D_LP_S. 4 to 6: C_LP_S, D_FP_S, D_LP_S between hosts.
static bhvd_handle *post(bhvd_context *ctx, struct memory *m, int kind, int round)
{
    static const bhvd_kind kinds[KINDS] = {BHVD_C_LP_S, BHVD_C_LP_S, BHVD_D_FP_S, BHVD_D_LP_S,
                                            BHVD_C_LP_S, BHVD_D_FP_S, BHVD_D_LP_S};
    float *const *replicas = kind == 3 ? m->replicas : m->of_hosts;
    const int64_t shapes[3] = {1000, 0, COUNT - 1000};
    struct bhvd_tensor tensors[3];
    for (size_t t = 0, at = 0; t < 3; at += (size_t)shapes[t++])
        tensors[t] = (struct bhvd_tensor){m->values + at, m->out[kind] + at, &shapes[t], 1, BHVD_FLOAT32};
    char name[32];
    snprintf(name, sizeof name, "kind.%d", kind);
    struct bhvd_args args = {
        .kind = kinds[kind], .name = name, .tensors = tensors, .tensor_count = 3, .op = BHVD_OP_AVERAGE,
        .prescale_factor = 1.0, .postscale_factor = 1.0, .codec = BHVD_CODEC_MINMAX_UINT8,
        .exchange = kind == 1 ? BHVD_EXCHANGE_ALLGATHER : BHVD_EXCHANGE_SCATTER_GATHER,
        .worker_residual = kind == 0 ? m->worker_residual : NULL, .server_residual = kind == 0 ? m->server_residual : NULL,
        .replicas = {replicas[0], replicas[1], replicas[2]},
        .topology = BHVD_TOPOLOGY_SHIFT_ONE, .round = round, .hierarchical = kind > 3, .device = -1};
    struct bhvd_error error;
    bhvd_handle *handle;
    CHECK_STATUS(bhvd_post(ctx, &args, &handle, &error), BHVD_OK);
    return handle;
}

static void check_constant(const float *array, float expected)
{
    for (int i = 0; i < COUNT; i++)
        CHECK(array[i] == expected);
}

// Rank r sends r + 1 everywhere; a constant segment is encoded exactly.
static void all_at_once(struct job *job, int rank, bhvd_context *ctx)
{
    struct memory m = memory_create((float)(rank + 1));
    (void)job;
    for (int round = 0; round < ROUNDS; round++) {
        bhvd_handle *handles[KINDS];
        for (int k = 0; k < KINDS; k++) {
            int kind = (k + rank) % KINDS;
            handles[kind] = post(ctx, &m, kind, round);
        }
        for (int kind = 0; kind < KINDS; kind++)
            finish(handles[kind], BHVD_OK);
        int peer = (round - rank + RANKS) % RANKS;      // three ranks: the circle method
        check_constant(m.out[0], 2.0f);
        check_constant(m.out[1], 2.0f);
        check_constant(m.out[4], 2.0f);     // (hosts / n) sum is a whole number on every path: 2, or, flat, r + 1
        check_constant(m.out[2], (float)(rank + peer + 2) / 2);
        check_constant(m.replicas[0], (float)((rank + 1) * (round + 1)));
        check_constant(m.replicas[1], (float)(((rank + RANKS - 1) % RANKS + 1) * (round + 1)));
        check_constant(m.replicas[2], (float)(((rank + 1) % RANKS + 1) * (round + 1)));
        check_constant(m.worker_residual, 0.0f);
        check_constant(m.values, (float)(rank + 1));
    }
    memory_destroy(&m);
}

TEST(primitives_in_flight_together) { on_every_path(all_at_once); }

TEST(flat_vectors)
{
    const float values[4] = {1.0f, -2.5f, 65504.0f, 3.0f};
    const uint16_t half[3] = {0x3c00, 0xc100, 0x7bff}, brain[1] = {0x4040};
    const int64_t three = 3, one = 1, none = 0;
    uint16_t half_out[3], brain_out[1];
    struct bhvd_tensor tensors[3] = {{half, half_out, &three, 1, BHVD_FLOAT16},
                                     {NULL, NULL, &none, 1, BHVD_FLOAT32},
                                     {brain, brain_out, &one, 1, BHVD_BFLOAT16}};
    float flat[4];
    CHECK_STATUS(bhvd_pack(tensors, 3, BHVD_FLOAT32, flat), BHVD_OK);
    CHECK_MEM_EQ(flat, values, sizeof flat);
    CHECK_STATUS(bhvd_unpack(tensors, 3, BHVD_FLOAT32, flat), BHVD_OK);
    CHECK_MEM_EQ(half_out, half, sizeof half);
    CHECK_MEM_EQ(brain_out, brain, sizeof brain);
    CHECK_STATUS(bhvd_pack(tensors, 3, BHVD_FLOAT64, flat), BHVD_ERR_UNSUPPORTED);
    CHECK_STATUS(bhvd_pack(tensors, 1, BHVD_FLOAT16, flat), BHVD_OK);
    CHECK_MEM_EQ(flat, half, sizeof half);
    tensors[1].dtype = BHVD_INT32;
    CHECK_STATUS(bhvd_unpack(tensors, 3, BHVD_FLOAT32, flat), BHVD_ERR_UNSUPPORTED);
}

// The elements that it reads and writes, over more than one block; tests/kernels/test_adam.py tests the values.
TEST(adam_on_tensors)
{
    enum { LONG = 1500 };
    const int64_t count = LONG, one = 1;
    float *m = floats(LONG, 1), *v = floats(LONG, 4), *g = floats(LONG, 2), *x = floats(LONG, 8), *sent = floats(LONG + 1, 0),
          *exact = floats(LONG + 1, 4), *own = floats(LONG + 1, 4);
    uint16_t half[4] = {0x3c00, 0x4400, 0x4000, 0x4800};       // 1, 4, 2, 8
    float *const of[4] = {m, v, g, x};
    struct bhvd_tensor tensors[4][2];
    for (int i = 0; i < 4; i++) {
        tensors[i][0] = (struct bhvd_tensor){of[i], of[i], &count, 1, BHVD_FLOAT32};
        tensors[i][1] = (struct bhvd_tensor){&half[i], &half[i], &one, 1, BHVD_FLOAT16};
    }
    const struct bhvd_adam by[2] = {{0.5, 1, 0, 100, 0.25, 0.5, 0}, {0.5, 1, 0, 100, 0.25, 0.5, 0}};
    CHECK_STATUS(bhvd_adam_momentum(tensors[0], tensors[1], tensors[2], tensors[3], by, 2, 1, BHVD_FLOAT32, sent), BHVD_OK);
    for (int i = 0; i < LONG + 1; i++)
        CHECK(sent[i] == (0.5f * 1 + 0.5f * (2 + 0.25f * 8)) / 2);
    CHECK_STATUS(bhvd_adam_step(tensors[0], tensors[1], tensors[3], by, 2, 1, BHVD_FLOAT32, sent), BHVD_OK);
    for (int i = 0; i < LONG; i++)
        CHECK(m[i] == 2.5f && x[i] == 8 - 0.5f * 2.5f / 2);
    CHECK(half[0] == 0x4100 && half[3] == 0x4760);             // 2.5; 7.375
    const struct bhvd_adam_variance variance[2] = {{0.5, 0.25, 0.25, 0.75, 2}, {0.5, 0.25, 0.25, 0.75, 2}};
    CHECK_STATUS(bhvd_adam_variance(tensors[1], tensors[2], variance, 2, BHVD_FLOAT32, exact, own), BHVD_OK);
    for (int i = 0; i < LONG; i++)
        CHECK(exact[i] == 4 && own[i] == 4 && v[i] == (0.75f * 4 - 0.5f * 4) / 0.5f);
    CHECK(half[1] == 0x4000);
    CHECK_STATUS(bhvd_adam_step(tensors[0], tensors[1], tensors[3], by, 2, 1, BHVD_FLOAT64, sent), BHVD_ERR_UNSUPPORTED);
    float *const all[7] = {m, v, g, x, sent, exact, own};
    for (int i = 0; i < 7; i++)
        free(all[i]);
}

// Else a code that is not expected yet could block an earlier execution's messages for ever.
TEST(a_link_may_read_every_code_before_it_is_expected)
{
    const struct bhvd_codec_options all = {.parameter = 1};
    for (int codec = BHVD_CODEC_NONE + 1; codec < BHVD_CODEC_COUNT; codec++) {
        const bool is_sparse = codec == BHVD_CODEC_TOPK || codec == BHVD_CODEC_TOPK_2BIT;
        for (int dtype = 0; dtype < BHVD_DTYPE_COUNT; dtype++)
            CHECK(bhvd_encoded_size(codec, dtype, SEGMENTS_MAX_COUNT, is_sparse ? &all : NULL) <= LINK_UNEXPECTED_MAX);
    }
}
