// Any struct bhvd_args, posted by both ranks of a job of two: the call is rejected, or the operation ends as documented.
// Equal arguments never disagree, and after each operation an allreduce is correct.
//
//     for each operation: bits (u8), the fields that `bits` marks as hostile, see fill; then its tensors, splits and arrays.
//     bits: 1 the ranks' arguments differ; 2 on a device; 4 with error states and replicas; 8 hostile numbers.
//
// Memory always has the size of the shape, since no call can check that; shapes that exceed the possible memory come without
// memory.
#include "fuzz.h"

#include <unistd.h>

#include "core/context/context.h"
#include "core/context/operation.h"
#include "../native/host_device.h"

enum { RANKS = 2, OPERATIONS_MAX = 12, TENSORS_MAX = 4, DIMS_MAX = 300, SPLITS_MAX = 8, ELEMENTS_MAX = 2048, COUNT = 5,
       SECONDS_MAX = 60 };

static bhvd_context *ranks[RANKS];
static bhvd_device *device;

// One rank's arguments, and all the memory that they point to.
struct post {
    struct bhvd_args args;
    struct bhvd_tensor tensors[TENSORS_MAX];
    int64_t shapes[TENSORS_MAX][DIMS_MAX];
    int32_t splits[SPLITS_MAX];
    char name[32];
    void *memory[2 * TENSORS_MAX + 5];
    int memory_count;
    bhvd_handle *handle;
    bhvd_status status;
};

static int32_t hostile_i32(struct supply *s)
{
    static const int32_t some[] = {INT32_MIN, INT32_MIN + 1, -2, -1, 1 << 8, 1 << 16, 1023, 1024, INT32_MAX};
    uint8_t choice = supply_u8(s);
    return choice < 128 ? choice % 13 : choice < 250 ? some[choice % (sizeof some / sizeof *some)]
                                                     : (int32_t)(supply_u16(s) * 65537u);
}

static double hostile_f64(struct supply *s)
{
    static const double some[] = {0, 1, -1, 0.5, 1e300, -1e300, 1e-310, 0.0 / 0.0, 1.0 / 0.0, -1.0 / 0.0, 127, 128};
    return some[supply_u8(s) % (sizeof some / sizeof *some)];
}

static int64_t hostile_dim(struct supply *s, bool hostile)
{
    static const int64_t some[] = {-1, INT64_MIN, INT64_MAX, 1LL << 32, 1LL << 55, 1LL << 57, 3};
    uint8_t choice = supply_u8(s);
    return hostile && choice >= 200 ? some[choice % (sizeof some / sizeof *some)] : choice % 6;
}

static void *take_memory(struct post *p, size_t nbytes)
{
    return p->memory[p->memory_count++] = calloc(nbytes + 1, 1);
}

// Elements of the shape; -1: more than memory could hold, so that it must be rejected.
static int64_t count_of(const int64_t *shape, int ndim)
{
    int64_t count = 1;
    for (int d = 0; d < ndim; d++) {
        if (shape[d] < 0 || __builtin_mul_overflow(count, shape[d] ? shape[d] : 1, &count) || count > OPERATION_COUNT_MAX)
            return -1;
    }
    for (int d = 0; d < ndim; d++)
        count = shape[d] ? count : 0;
    return count;
}

static size_t fill_tensor(struct post *p, int t, struct supply *s, bool hostile)
{
    struct bhvd_tensor *tensor = &p->tensors[t];
    uint8_t dims = supply_u8(s), place = supply_u8(s);
    const int32_t ndim = hostile && dims > 250 ? (dims - 253) * 128 : dims % 4;
    tensor->ndim = ndim;
    tensor->dtype = hostile && place > 250 ? hostile_i32(s) : place % BHVD_DTYPE_COUNT;
    tensor->shape = p->shapes[t];
    const int used = ndim < 0 ? 0 : ndim > DIMS_MAX ? DIMS_MAX : ndim;
    for (int d = 0; d < used; d++)
        p->shapes[t][d] = used > 4 ? 1 : hostile_dim(s, hostile);
    int64_t count = count_of(p->shapes[t], used);
    if (count > ELEMENTS_MAX) {
        p->shapes[t][0] = 1;
        for (int d = 1; d < used; d++)
            p->shapes[t][d] = 3;
        count = count_of(p->shapes[t], used);
    }
    const size_t nbytes = count < 0 ? 0 : (size_t)count * 8;
    tensor->src = take_memory(p, nbytes);
    const bool gathers = p->args.kind == BHVD_ALLGATHER || p->args.kind == BHVD_ALLTOALL;
    tensor->dst = place & 16   ? (void *)tensor->src
                  : place & 32 ? NULL
                               : take_memory(p, gathers ? RANKS * ELEMENTS_MAX * 8 : nbytes);
    tensor->dst_on_host = place & 64;
    return count < 0 ? 0 : (size_t)count;
}

static void fill_states(struct post *p, size_t count, struct supply *s)
{
    uint8_t which = supply_u8(s);
    struct bhvd_args *args = &p->args;
    args->worker_residual = which & 1 ? take_memory(p, count * sizeof(float)) : NULL;
    args->server_residual = which & 2 ? take_memory(p, (count + RANKS) * sizeof(float)) : NULL;
    for (int r = 0; r < REPLICAS; r++) {
        args->replicas[r] = which & 4 << r ? take_memory(p, count * sizeof(float)) : NULL;
        args->before[r] = hostile_f64(s);
        args->after[r] = hostile_f64(s);
    }
    args->after[REPLICAS] = which & 32 ? hostile_f64(s) : 0;
}

static void fill(struct post *p, struct supply *s, uint8_t bits)
{
    const bool hostile = bits & 8;
    struct bhvd_args *args = &p->args;
    size_t elements = 0;
    *args = (struct bhvd_args){
        .kind = supply_u8(s) % (BHVD_PROCESS_SET_REMOVE + 1), .name = p->name, .op = supply_u8(s) % 2, .device = -1,
        .prescale_factor = 1.0, .postscale_factor = 1.0, .codec = supply_u8(s) % BHVD_CODEC_COUNT, .tensors = p->tensors};
    args->tensor_count = OPERATION_TRAITS[args->kind].has_tensors ? 1 + supply_u8(s) % TENSORS_MAX : 0;
    if (hostile) {
        int32_t *const fields[] = {&args->kind, &args->process_set, &args->op, &args->root_rank, &args->codec,
                                   &args->exchange, &args->topology, &args->round, &args->hierarchical, &args->device,
                                   &args->blocking};
        for (uint8_t more = supply_u8(s) % 8; more; more--)
            *fields[supply_u8(s) % (sizeof fields / sizeof *fields)] = hostile_i32(s);
        double *const factors[] = {&args->prescale_factor, &args->postscale_factor, &args->codec_options.parameter};
        for (uint8_t more = supply_u8(s) % 4; more; more--)
            *factors[supply_u8(s) % 3] = hostile_f64(s);
        if (supply_u8(s) == 255)
            args->tensor_count = supply_u8(s) % (TENSORS_MAX + 1);
    }
    args->blocking &= 1;        // this thread waits for both ranks
    for (size_t t = 0; t < args->tensor_count; t++)
        elements += fill_tensor(p, (int)t, s, hostile);
    if (args->kind == BHVD_ALLTOALL || args->kind == BHVD_PROCESS_SET_ADD || (hostile && supply_u8(s) == 255)) {
        args->split_count = supply_u8(s) % (SPLITS_MAX + 1);
        args->splits = supply_u8(s) == 255 ? NULL : p->splits;
        for (size_t i = 0; i < SPLITS_MAX; i++)
            p->splits[i] = hostile ? hostile_i32(s) : supply_u8(s) % 3;
        if (hostile && supply_u8(s) == 255)
            args->split_count = SIZE_MAX / 4 + 1;
    }
    if (bits & 2) {
        args->gpu = device;
        args->device = hostile ? args->device : 0;
    }
    if (bits & 4)
        fill_states(p, elements, s);
}

static bool is_error(bhvd_status status) { return status >= BHVD_ERR_ARGUMENT && status <= BHVD_ERR_UNSUPPORTED; }

static void explain(const struct post *p, bhvd_status status, const struct bhvd_error *error)
{
    if (status && !is_error(status))
        fprintf(stderr, "kind %d of %zu tensors: status %d, %s\n", p->args.kind, p->args.tensor_count, status, error->message);
}

static void post(struct post *p, int rank)
{
    struct bhvd_error error;
    p->status = bhvd_post(ranks[rank], &p->args, &p->handle, &error);
    explain(p, p->status, &error);
    REQUIRE(p->status == BHVD_OK ? p->handle != NULL : is_error(p->status) && !p->handle && error.message[0]);
}

// Whether the two operations are matched with each other.
static bool same_key(const struct bhvd_args *a, const struct bhvd_args *b)
{
    return a->kind == BHVD_JOIN || a->process_set == b->process_set;
}

// Keeps an operation that only one rank has posted from waiting forever: the other rank disagrees, or joins too.
static bhvd_handle *disagree(const struct post *p, int rank)
{
    struct bhvd_args args = {.kind = p->args.kind == BHVD_JOIN ? BHVD_JOIN : BHVD_BARRIER, .name = p->name, .device = -1,
                             .prescale_factor = 1.0, .postscale_factor = 1.0, .process_set = p->args.process_set};
    struct bhvd_error error;
    bhvd_handle *handle;
    return bhvd_post(ranks[rank], &args, &handle, &error) ? NULL : handle;
}

static void take_results(struct post *p)
{
    for (size_t t = 0; t < p->args.tensor_count; t++) {
        struct bhvd_result result;
        int32_t splits[RANKS];
        if (!bhvd_result_take(p->handle, t, &result))
            bhvd_result_free(result.data);
        bhvd_received_splits(p->handle, t, splits, RANKS);
    }
    bhvd_handle_value(p->handle);
}

static bhvd_status end(struct post *p)
{
    struct bhvd_error error;
    if (p->status)
        return p->status;
    bhvd_status status = bhvd_wait(p->handle, -1, &error);
    explain(p, status, &error);
    REQUIRE(status == BHVD_OK || (is_error(status) && error.message[0]));
    if (!status)
        take_results(p);
    bhvd_handle_drop(p->handle);
    return status;
}

static void free_post(struct post *p)
{
    for (int i = 0; i < p->memory_count; i++)
        free(p->memory[i]);
    free(p);
}

static void check_job(void)
{
    int32_t x[RANKS][COUNT];
    struct post p[RANKS] = {0};
    for (int rank = 0; rank < RANKS; rank++) {
        p[rank].shapes[0][0] = COUNT;
        for (int i = 0; i < COUNT; i++)
            x[rank][i] = rank + i;
        p[rank].tensors[0] = (struct bhvd_tensor){x[rank], x[rank], p[rank].shapes[0], 1, BHVD_INT32, 0};
        p[rank].args = (struct bhvd_args){
            .kind = BHVD_ALLREDUCE, .name = "check", .tensors = p[rank].tensors, .tensor_count = 1, .op = BHVD_OP_SUM,
            .prescale_factor = 1.0, .postscale_factor = 1.0, .device = -1};
        post(&p[rank], rank);
    }
    for (int rank = 0; rank < RANKS; rank++) {
        REQUIRE(end(&p[rank]) == BHVD_OK);
        for (int i = 0; i < COUNT; i++)
            REQUIRE(x[rank][i] == 1 + 2 * i);
    }
}

static void ask_for_facts(struct supply *s, uint8_t bits)
{
    const int id = bits & 8 ? hostile_i32(s) : 0;
    const int size = bhvd_process_set_size(ranks[0], id);
    REQUIRE(size >= -1 && size <= RANKS && (size < 0) == (bhvd_process_set_rank(ranks[0], id) == -2));
}

static void run_operation(struct supply *s, int number)
{
    struct post *p[RANKS];
    const uint8_t bits = supply_u8(s);
    struct supply same = *s;
    for (int rank = 0; rank < RANKS; rank++) {
        p[rank] = calloc(1, sizeof *p[rank]);
        snprintf(p[rank]->name, sizeof p[rank]->name, "op.%d", number);
        if (!(bits & 1))
            *s = same;
        fill(p[rank], s, bits);
    }
    // A joined rank may or may not take part in what the other one posts: target_negotiation.c tests that.
    if (p[0]->args.kind == BHVD_JOIN)
        p[1]->args.kind = BHVD_JOIN;
    else if (p[1]->args.kind == BHVD_JOIN)
        p[1]->args.kind = BHVD_BARRIER;
    for (int rank = 0; rank < RANKS; rank++)
        post(p[rank], rank);
    const bool together = !p[0]->status && !p[1]->status && same_key(&p[0]->args, &p[1]->args);
    bhvd_handle *answers[RANKS] = {NULL, NULL};
    for (int rank = 0; rank < RANKS && !together; rank++)
        answers[rank] = p[rank]->status ? NULL : disagree(p[rank], 1 - rank);
    bhvd_status status[RANKS];
    for (int rank = 0; rank < RANKS; rank++)
        status[rank] = end(p[rank]);
    for (int rank = 0; rank < RANKS; rank++) {
        struct bhvd_error error;
        if (answers[rank])
            bhvd_wait(answers[rank], -1, &error);
        bhvd_handle_drop(answers[rank]);
    }
    for (int rank = 0; rank < RANKS && !(bits & 1) && together; rank++)
        REQUIRE(status[rank] != BHVD_ERR_MISMATCH || p[0]->args.kind == BHVD_ALLGATHER || p[0]->args.kind == BHVD_ALLTOALL);
    for (int rank = 0; rank < RANKS; rank++)
        free_post(p[rank]);
    ask_for_facts(s, bits);
    check_job();
}

static void create_ranks(void *world)
{
    for (int rank = 0; rank < RANKS; rank++) {
        const struct bhvd_context_options options = {
            .rank = rank, .size = RANKS, .transport = "inproc", .inproc_world = world, .fusion_threshold = 1 << 10,
            .cache_capacity = 4, .start_timeout_ms = 10000, .timeout_ms = 10000};
        struct bhvd_error error;
        REQUIRE(!bhvd_context_create(&options, &ranks[rank], &error));
    }
    // Set 1 consists of rank 0.
    struct post p[RANKS] = {0};
    for (int rank = 0; rank < RANKS; rank++) {
        p[rank].args = (struct bhvd_args){.kind = BHVD_PROCESS_SET_ADD, .name = "set", .splits = p[rank].splits,
                                          .split_count = 1, .prescale_factor = 1.0, .postscale_factor = 1.0, .device = -1};
        post(&p[rank], rank);
    }
    for (int rank = 0; rank < RANKS; rank++)
        REQUIRE(end(&p[rank]) == BHVD_OK);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct supply s = {data, data + size};
    void *world = bhvd_inproc_world_create(RANKS);
    alarm(SECONDS_MAX);         // an operation that never ends is a finding
    device = host_device_create();
    create_ranks(world);
    for (int i = 0; i < OPERATIONS_MAX && s.at < s.end; i++)
        run_operation(&s, i);
    for (int rank = 0; rank < RANKS; rank++)
        bhvd_context_destroy(ranks[rank]);
    bhvd_inproc_world_destroy(world);
    bhvd_device_drop(device);
    return 0;
}
