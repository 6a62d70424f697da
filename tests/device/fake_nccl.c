/* A fake libnccl.so.2, for tests on machines without GPUs; in one library with fake_cuda.c. It does the collectives that
 * native/gpu/nccl_execution.c uses, between threads or processes of one machine, through a shared mailbox for each ordered pair of
 * ranks. Its timings mean nothing.
 *
 * Behaviour that tests rely on:
 *   - Calls return ncclInProgress, as a non-blocking communicator may: their work is put on the stream only when the
 *     communicator's state is queried. An event recorded too early gives a wrong result.
 *   - It refuses calls without a current context, or that mix groups.
 *   - ncclCommAbort returns when all work of the GPU is done, as freeing memory does; so it never returns while another
 *     communicator's kernel hangs. From 2.22 on, the aborts of a group are one.
 *   - BHVD_FAKE_NCCL_SLOW_MS=n: a communicator, and its first collective, are in progress for n ms.
 *   - BHVD_FAKE_NCCL_FAIL_AFTER=n: the n-th group of this process reports an error of a peer, and hangs on all ranks until the
 *     communicator is aborted. BHVD_FAKE_NCCL_HANG=1: it hangs without an error. BHVD_FAKE_NCCL_VERSION: its version. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "fake_cuda.h"
#include "kernel/element.h"

#define API __attribute__((visibility("default")))
enum { SUCCESS = 0, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum { RANKS_MAX = 8, BOX_BYTES = 1 << 18, OPS_MAX = 512 };
enum kind { ALLREDUCE, REDUCE, REDUCE_SCATTER, BROADCAST, ALLGATHER, SEND, RECV };

struct box {
    atomic_uint full;
    size_t nbytes;
    unsigned char data[BOX_BYTES];
};

struct shared {
    atomic_int joined;
    struct box boxes[RANKS_MAX][RANKS_MAX];     /* [from][to] */
};

struct comm {
    struct shared *shared;
    int rank, size;
    atomic_int aborted, error, running, finalized, used;
    _Atomic int64_t busy_until_ms;
    struct group *late;                 /* put on the stream when the state is queried */
    struct comm *next;                  /* list of all communicators */
};

struct op {
    enum kind kind;
    const void *src;
    void *dst;
    size_t count;
    int type, op, peer;                 /* peer: or root */
};

struct group {
    struct comm *comm;
    void *stream;
    int count, hangs;
    struct op ops[OPS_MAX];
};

static _Thread_local struct group *open_group;
static _Thread_local int depth, aborts;
static atomic_int groups;
static _Atomic(struct comm *) comms;    /* never freed: a stream may still use one */

/* --------------------------------------------------------------------------------------------------- arithmetic */

static size_t size_of(int type)
{
    static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return SIZES[type];
}

#define APPLY(op, a, b) ((op) == 0 ? (a) + (b) : (op) == 1 ? (a) * (b) : (op) == 2 ? ((a) > (b) ? (a) : (b)) : ((a) < (b) ? (a) : (b)))
#define COMBINE(T) for (size_t i = 0; i < count; i++) ((T *)to)[i] = (T)APPLY(op, ((T *)to)[i], ((const T *)from)[i])
#define COMBINE_FLOAT(suffix, size)                                                                  \
    for (size_t i = 0; i < count; i++) {                                                             \
        const float a = load_##suffix((char *)to + size * i), b = load_##suffix((const char *)from + size * i); \
        store_##suffix((char *)to + size * i, APPLY(op, a, b));                                      \
    }

static void combine(void *to, const void *from, size_t count, int type, int op)
{
    switch (type) {
    case 0: COMBINE(int8_t); break;
    case 1: COMBINE(uint8_t); break;
    case 2: COMBINE(int32_t); break;
    case 4: COMBINE(int64_t); break;
    case 6: COMBINE_FLOAT(f16, 2) break;
    case 7: COMBINE(float); break;
    case 8: COMBINE(double); break;
    case 9: COMBINE_FLOAT(bf16, 2) break;
    default: abort();
    }
}

/* --------------------------------------------------------------------------------------------------- the exchange */

struct transfer {
    int peer, sends;
    unsigned char *data;
    size_t left;
};

struct exchange {
    struct transfer *transfers;
    size_t count, capacity;
};

static void add_transfer(struct exchange *x, int sends, int peer, const void *data, size_t nbytes)
{
    if (x->count == x->capacity) {
        x->capacity = x->capacity ? 2 * x->capacity : 64;
        x->transfers = realloc(x->transfers, x->capacity * sizeof *x->transfers);
    }
    if (nbytes)
        x->transfers[x->count++] = (struct transfer){peer, sends, (unsigned char *)data, nbytes};
}

/* Tries once to advance the first unfinished transfer of each direction and peer. */
static int advance(struct comm *comm, struct exchange *x)
{
    int left = 0;
    char seen[2][RANKS_MAX] = {{0}};
    for (size_t i = 0; i < x->count; i++) {
        struct transfer *t = &x->transfers[i];
        if (!t->left)
            continue;
        left = 1;
        if (seen[t->sends][t->peer])
            continue;
        seen[t->sends][t->peer] = 1;
        struct box *box = t->sends ? &comm->shared->boxes[comm->rank][t->peer] : &comm->shared->boxes[t->peer][comm->rank];
        if ((int)atomic_load(&box->full) == t->sends)
            continue;
        size_t n = t->left < BOX_BYTES ? t->left : BOX_BYTES;
        if (t->sends) {
            memcpy(box->data, t->data, n);
            box->nbytes = n;
        } else {
            if (box->nbytes != n)
                abort();                /* the ranks' operations differ */
            memcpy(t->data, box->data, n);
        }
        t->data += n;
        t->left -= n;
        atomic_store(&box->full, (unsigned)t->sends);
    }
    return left;
}

static void post(struct comm *comm, struct exchange *x, const struct op *op, unsigned char **inputs)
{
    const size_t nbytes = op->count * size_of(op->type);
    unsigned char *src = fake_cuda_visible(op->src), *dst = fake_cuda_visible(op->dst);
    const int scatters = op->kind == REDUCE_SCATTER;
    if (op->kind <= REDUCE_SCATTER)
        *inputs = malloc(nbytes * (size_t)comm->size + 1);
    for (int i = 0; i < comm->size; i++) {
        switch (op->kind) {
        case ALLREDUCE: case REDUCE: case REDUCE_SCATTER:
            if (op->kind != REDUCE || i == op->peer)
                add_transfer(x, 1, i, src + (scatters ? nbytes * (size_t)i : 0), nbytes);
            if (op->kind != REDUCE || comm->rank == op->peer)
                add_transfer(x, 0, i, *inputs + nbytes * (size_t)i, nbytes);
            break;
        case BROADCAST:
            if (comm->rank == op->peer)
                add_transfer(x, 1, i, src, nbytes);
            if (i == op->peer)
                add_transfer(x, 0, i, dst, nbytes);
            break;
        case ALLGATHER:
            add_transfer(x, 1, i, src, nbytes);
            add_transfer(x, 0, i, dst + nbytes * (size_t)i, nbytes);
            break;
        case SEND:
            if (i == op->peer)
                add_transfer(x, 1, i, src, nbytes);
            break;
        case RECV:
            if (i == op->peer)
                add_transfer(x, 0, i, dst, nbytes);
        }
    }
}

static void reduce(struct comm *comm, const struct op *op, unsigned char *inputs)
{
    const size_t nbytes = op->count * size_of(op->type);
    if (op->kind == REDUCE && comm->rank != op->peer)
        return;
    for (int i = 1; i < comm->size; i++)
        combine(inputs, inputs + nbytes * (size_t)i, op->count, op->type, op->op);
    memcpy(fake_cuda_visible(op->dst), inputs, nbytes);
}

static void run(void *arg)
{
    struct group *group = arg;
    struct comm *comm = group->comm;
    struct exchange x = {0};
    unsigned char *inputs[OPS_MAX] = {0};
    for (int i = 0; i < group->count; i++)
        post(comm, &x, &group->ops[i], &inputs[i]);
    while (!atomic_load(&comm->aborted) && (group->hangs || advance(comm, &x)))
        sched_yield();
    for (int i = 0; i < group->count; i++) {
        if (inputs[i] && !atomic_load(&comm->aborted))
            reduce(comm, &group->ops[i], inputs[i]);
        free(inputs[i]);
    }
    free(x.transfers);
    free(group);
    atomic_fetch_sub(&comm->running, 1);
}

/* ------------------------------------------------------------------------------------------------------ groups */

static int number(const char *variable)
{
    const char *text = getenv(variable);
    return text ? atoi(text) : 0;
}

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void launch(struct group *group)
{
    if (!atomic_exchange(&group->comm->used, 1))
        atomic_store(&group->comm->busy_until_ms, now_ms() + number("BHVD_FAKE_NCCL_SLOW_MS"));
    if (atomic_fetch_add(&groups, 1) + 1 == number("BHVD_FAKE_NCCL_FAIL_AFTER")) {
        group->hangs = 1;
        if (!number("BHVD_FAKE_NCCL_HANG"))
            atomic_store(&group->comm->error, REMOTE_ERROR);
    }
    fake_cuda_call(group->stream, run, group);
}

API int ncclGroupStart(void)
{
    depth++;
    return SUCCESS;
}

API int ncclGroupEnd(void)
{
    struct group *group = open_group;
    if (depth-- <= 0)
        return INVALID_USAGE;
    if (!depth && aborts) {
        aborts = 0;
        fake_cuda_wait_for_device();
    }
    if (depth || !group)
        return SUCCESS;
    open_group = NULL;
    if (group->comm->late)
        return INVALID_USAGE;           /* the previous group is still pending */
    group->comm->late = group;
    return IN_PROGRESS;
}

static int add(struct comm *comm, void *stream, struct op op)
{
    if (!fake_cuda_is_current() || !comm || !stream || atomic_load(&comm->aborted) || op.type < 0 || op.type > 9)
        return INVALID_ARGUMENT;
    ncclGroupStart();
    if (!open_group) {
        open_group = calloc(1, sizeof *open_group);
        open_group->comm = comm;
        open_group->stream = stream;
        atomic_fetch_add(&comm->running, 1);
    }
    if (open_group->comm != comm || open_group->stream != stream || open_group->count == OPS_MAX)
        return INVALID_USAGE;
    open_group->ops[open_group->count++] = op;
    return ncclGroupEnd();
}

API int ncclAllReduce(const void *src, void *dst, size_t count, int type, int op, struct comm *comm, void *stream)
{
    return add(comm, stream, (struct op){ALLREDUCE, src, dst, count, type, op, 0});
}

API int ncclReduce(const void *src, void *dst, size_t count, int type, int op, int root, struct comm *comm, void *stream)
{
    return add(comm, stream, (struct op){REDUCE, src, dst, count, type, op, root});
}

API int ncclReduceScatter(const void *src, void *dst, size_t count, int type, int op, struct comm *comm, void *stream)
{
    return add(comm, stream, (struct op){REDUCE_SCATTER, src, dst, count, type, op, 0});
}

API int ncclBroadcast(const void *src, void *dst, size_t count, int type, int root, struct comm *comm, void *stream)
{
    return add(comm, stream, (struct op){BROADCAST, src, dst, count, type, 0, root});
}

API int ncclAllGather(const void *src, void *dst, size_t count, int type, struct comm *comm, void *stream)
{
    return add(comm, stream, (struct op){ALLGATHER, src, dst, count, type, 0, 0});
}

API int ncclSend(const void *src, size_t count, int type, int peer, struct comm *comm, void *stream)
{
    return add(comm, stream, (struct op){SEND, src, NULL, count, type, 0, peer});
}

API int ncclRecv(void *dst, size_t count, int type, int peer, struct comm *comm, void *stream)
{
    return add(comm, stream, (struct op){RECV, NULL, dst, count, type, 0, peer});
}

/* ----------------------------------------------------------------------------------------------- communicators */

struct unique_id {
    char bytes[128];
};

struct config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

API int ncclGetVersion(int *version)
{
    *version = number("BHVD_FAKE_NCCL_VERSION");
    if (!*version)
        *version = 22105;
    return SUCCESS;
}

/* The id names memory that is freed with its last user. */
API int ncclGetUniqueId(struct unique_id *id)
{
    int fd = memfd_create("fake_nccl", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, sizeof(struct shared)))
        return 2;
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "/proc/%d/fd/%d", (int)getpid(), fd);
    return SUCCESS;
}

API int ncclCommInitRankConfig(struct comm **out, int size, struct unique_id id, int rank, struct config *config)
{
    if (!fake_cuda_is_current() || size > RANKS_MAX || config->magic != 0xcafebeef || config->size < sizeof *config ||
        config->version < 21400 || config->blocking)
        return INVALID_ARGUMENT;
    int fd = open(id.bytes, O_RDWR | O_CLOEXEC);
    struct comm *comm = calloc(1, sizeof *comm);
    comm->shared = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *comm->shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (comm->shared == MAP_FAILED)
        return 2;
    comm->rank = rank;
    comm->size = size;
    comm->next = atomic_load(&comms);
    while (!atomic_compare_exchange_weak(&comms, &comm->next, comm)) {
    }
    atomic_store(&comm->busy_until_ms, now_ms() + number("BHVD_FAKE_NCCL_SLOW_MS"));
    *out = comm;
    atomic_fetch_add(&comm->shared->joined, 1);
    return IN_PROGRESS;
}

API int ncclCommGetAsyncError(struct comm *comm, int *error)
{
    struct group *late = comm->late;
    const int waits = atomic_load(&comm->shared->joined) < comm->size || now_ms() < atomic_load(&comm->busy_until_ms);
    *error = waits ? IN_PROGRESS : atomic_load(&comm->error);
    if (late) {
        comm->late = NULL;
        *error = IN_PROGRESS;
        launch(late);
    }
    if (atomic_load(&comm->finalized) && atomic_load(&comm->running))
        *error = IN_PROGRESS;
    return fake_cuda_is_current() ? SUCCESS : INVALID_ARGUMENT;
}

API int ncclCommFinalize(struct comm *comm)
{
    atomic_store(&comm->finalized, 1);
    return IN_PROGRESS;
}

API int ncclCommDestroy(struct comm *comm)
{
    return atomic_load(&comm->finalized) && !atomic_load(&comm->running) ? SUCCESS : INVALID_USAGE;
}

API int ncclCommAbort(struct comm *comm)
{
    int version;
    ncclGetVersion(&version);
    atomic_store(&comm->aborted, 1);
    if (depth && version >= 22200)
        aborts++;
    else
        fake_cuda_wait_for_device();
    return SUCCESS;
}

API const char *ncclGetErrorString(int result)
{
    return result == REMOTE_ERROR ? "remote process exited or there was a network error" : "some error of the fake";
}

API const char *ncclGetLastError(struct comm *comm)
{
    (void)comm;
    return "the stand-in was told to fail";
}

/* Fake only: groups that this process has launched. */
API int fake_nccl_groups(void) { return atomic_load(&groups); }
