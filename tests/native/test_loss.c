// Losing a rank, with real processes: survivors destroy their contexts, with half-received messages, and start a new job.
// BHVD_CHAOS_RUNS: how many jobs the chaos test runs, each from its own seed; 1 by default.
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "check.h"
#include "gather.h"

enum { RANKS = 5, OPERATIONS = 8, LONGEST = 2 << 20, LIMIT_MS = 90000, HALF_RECEIVED = 48 << 18 };

// Shared by the test and its ranks' processes.
struct board {
    struct gathering gatherings[RANKS];         // by generation
    _Atomic int generation;             // of the job
    _Atomic int alive[RANKS];
    _Atomic int steps[RANKS];           // completed by the rank in this generation
    _Atomic int generations_left[RANKS];    // number of contexts that it has destroyed
};

static struct board *board;

static void *shared_memory(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

// Forks a rank's process, which ends with the test.
static pid_t fork_rank(void)
{
    const pid_t child = fork();
    if (child == 0)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    return child;
}

static struct bhvd_context_options options_of(struct gatherer *gatherer, const char *transport)
{
    return (struct bhvd_context_options){
        .rank = gatherer->rank, .size = gatherer->size, .transport = transport, .gather = gather, .user = gatherer,
        .listen_host = "127.0.0.1", .fusion_threshold = 1 << 22,
        .cache_capacity = 64, .start_timeout_ms = 60000, .timeout_ms = 30000, .heartbeat_timeout_ms = 8000};
}

// -------------------------------------------------------------------------------------------------------- half received

static bhvd_status reduce(bhvd_context *ctx, bhvd_op op, float *data, int64_t count, struct bhvd_error *error)
{
    const struct bhvd_tensor tensor = {.src = data, .dst = data, .shape = &count, .ndim = 1, .dtype = BHVD_FLOAT32};
    const struct bhvd_args args = {.kind = BHVD_ALLREDUCE, .name = "x", .tensors = &tensor, .tensor_count = 1, .op = op,
                                   .prescale_factor = 1, .postscale_factor = 1, .device = -1};
    bhvd_handle *handle;
    CHECK_STATUS(bhvd_post(ctx, &args, &handle, error), BHVD_OK);
    bhvd_status status = bhvd_wait(handle, -1, error);
    bhvd_handle_drop(handle);
    return status;
}

// Stops the peer when an eighth has arrived, so that its next message is half received, and kills it when no data moves any more.
static void *stop_then_kill(void *arg)
{
    struct bhvd_counters counters = {0};
    const pid_t child = (pid_t)board->steps[1];
    while (counters.payload_bytes_received < (uint64_t)HALF_RECEIVED * sizeof(float) / 8) {
        usleep(200);
        bhvd_context_counters(arg, &counters);
    }
    kill(child, SIGSTOP);
    usleep(300000);
    kill(child, SIGKILL);
    return NULL;
}

static void lose_the_peer(bhvd_op op)
{
    float *data = calloc(HALF_RECEIVED, sizeof *data);
    board = shared_memory(sizeof *board);
    const pid_t child = fork_rank();    // before there are threads
    const int rank = child == 0;
    struct bhvd_error error;
    bhvd_context *ctx;
    if (rank == 0)
        board->steps[1] = child;
    struct gatherer gatherer = {board->gatherings, rank, 2};
    const struct bhvd_context_options options = options_of(&gatherer, "tcp");
    CHECK_STATUS(bhvd_context_create(&options, &ctx, &error), BHVD_OK);
    pthread_t killer;
    if (rank == 0)
        CHECK_EQ(pthread_create(&killer, NULL, stop_then_kill, ctx), 0);
    const bhvd_status status = reduce(ctx, op, data, HALF_RECEIVED, &error);
    if (rank == 1)
        pause();
    pthread_join(killer, NULL);
    CHECK_STATUS(status, BHVD_ERR_PEER_LOST);
    bhvd_context_destroy(ctx);
    waitpid(child, NULL, 0);
    munmap(board, sizeof *board);
    free(data);
}

TEST(a_context_is_destroyed_with_a_message_half_received) { lose_the_peer(BHVD_OP_SUM); }

TEST(a_context_is_destroyed_with_adasum_half_received) { lose_the_peer(BHVD_OP_ADASUM); }

// ------------------------------------------------------------------------------------------------------- descriptors

enum { MANY = 9 };                      // ranks of a job that is not small: links are opened when needed

// Rank 1 has no descriptor left when rank 2 first connects to it, in the first allreduce.
static void lack_descriptors(int rank)
{
    struct bhvd_error error;
    bhvd_context *ctx;
    float *data = calloc(1 << 20, sizeof *data);
    struct gatherer gatherer = {board->gatherings, rank, MANY};
    struct bhvd_context_options options = options_of(&gatherer, "tcp");
    options.allreduce_path = "ring";
    CHECK_STATUS(bhvd_context_create(&options, &ctx, &error), BHVD_OK);
    if (rank == 1) {
        const int lowest = open("/dev/null", O_RDONLY);
        CHECK_EQ(setrlimit(RLIMIT_NOFILE, &(struct rlimit){(rlim_t)lowest, (rlim_t)lowest}), 0);
        board->steps[1] = 1;
    }
    while (board->steps[1] == 0)
        usleep(1000);
    CHECK_STATUS(reduce(ctx, BHVD_OP_SUM, data, 1 << 20, &error), BHVD_ERR_SYSTEM);
    CHECK_STR_EQ(error.message + (rank == 1 ? 0 : strlen("rank 1 failed: ")),
                 "the connections of the other ranks cannot be accepted: Too many open files; raise the limit of open files "
                 "(ulimit -n)");
    CHECK_EQ(error.rank, rank == 1 ? -1 : 1);
    bhvd_context_destroy(ctx);
    free(data);
}

TEST(every_rank_hears_that_one_has_no_descriptors)
{
    pid_t pids[MANY - 1];
    board = shared_memory(sizeof *board);
    for (int i = 0; i < MANY - 1; i++) {
        if (!(pids[i] = fork_rank())) {
            lack_descriptors(1 + i);
            exit(0);
        }
    }
    lack_descriptors(0);
    for (int i = 0; i < MANY - 1; i++) {
        int status;
        CHECK_EQ(waitpid(pids[i], &status, 0), pids[i]);
        CHECK_EQ(status, 0);
    }
    munmap(board, sizeof *board);
}

// ---------------------------------------------------------------------------------------------------------------- chaos

struct chaos {
    const char *transport, *path;
    int hosts;
};

static const struct chaos KINDS[] = {{"auto", "", 2}, {"tcp", "halving", 2}, {"shm", "ring", 1}, {"auto", "ring", 2}};

struct posted {
    bhvd_handle *handle;
    const float *sum;                   // NULL: not compared
    int64_t count;
};

static int size_of(int me, int *rank)
{
    int size = 0;
    for (int i = 0; i < RANKS; i++) {
        if (i == me)
            *rank = size;
        size += board->alive[i];
    }
    return size;
}

// Every rank draws the same operations from the same seed.
static bhvd_status post_one(bhvd_context *ctx, int k, int step, int rank, int size, unsigned *seed, float *src, float *dst,
                            struct posted *out, struct bhvd_error *error)
{
    static const bhvd_kind kinds[] = {BHVD_ALLREDUCE, BHVD_ALLGATHER, BHVD_BROADCAST, BHVD_REDUCESCATTER,
                                      BHVD_C_LP_S, BHVD_D_FP_S, BHVD_ALLREDUCE, BHVD_ALLREDUCE};
    const bhvd_kind kind = kinds[rand_r(seed) % 8];
    const int64_t count = 1 + rand_r(seed) % (rand_r(seed) % 3 ? 20000 : LONGEST / size);
    const bool is_allreduce = kind == BHVD_ALLREDUCE, is_allocated = kind == BHVD_ALLGATHER || kind == BHVD_REDUCESCATTER;
    const bool is_adasum = rand_r(seed) % 6 == 0 && is_allreduce && !(size & (size - 1));
    char name[32];
    snprintf(name, sizeof name, "%d.%d", k, step % 5);
    for (int64_t i = 0; i < count; i++)
        src[i] = (float)rank + 1;
    const struct bhvd_tensor tensor = {.src = src, .dst = is_allocated ? NULL : dst, .shape = &count, .ndim = 1,
                                       .dtype = BHVD_FLOAT32};
    const struct bhvd_args args = {
        .kind = kind, .name = name, .tensors = &tensor, .tensor_count = 1, .op = is_adasum ? BHVD_OP_ADASUM : BHVD_OP_SUM,
        .prescale_factor = 1, .postscale_factor = 1, .codec = BHVD_CODEC_MINMAX_UINT8, .topology = BHVD_TOPOLOGY_RING,
        .device = -1};
    *out = (struct posted){NULL, is_allreduce && !is_adasum ? dst : NULL, count};
    return bhvd_post(ctx, &args, &out->handle, error);
}

static bhvd_status finish(struct posted *posted, int size, struct bhvd_error *error)
{
    if (!posted->handle)
        return BHVD_OK;
    bhvd_status status = bhvd_wait(posted->handle, -1, error);
    for (int64_t i = 0; !status && posted->sum && i < posted->count; i++)
        if (posted->sum[i] != (float)(size * (size + 1) / 2))
            CHECK_EQ(posted->sum[i], size * (size + 1) / 2);
    bhvd_handle_drop(posted->handle);
    return status;
}

static bhvd_status run_step(bhvd_context *ctx, int step, int rank, int size, float *src, float *dst, struct bhvd_error *error)
{
    struct posted posted[OPERATIONS] = {0};
    unsigned seed = (unsigned)(step * 7919 + board->generation);
    bhvd_status status = BHVD_OK;
    for (int k = 0; k < OPERATIONS && !status; k++)
        status = post_one(ctx, k, step, rank, size, &seed, src + (size_t)k * LONGEST, dst + (size_t)k * LONGEST, &posted[k], error);
    for (int k = 0; k < OPERATIONS; k++) {
        struct bhvd_error later;
        bhvd_status ended = finish(&posted[k], size, status ? &later : error);
        status = status ? status : ended;
    }
    return status;
}

// A rank's loop over generations, until it is killed or the only one left.
static void live(int me, const struct chaos *kind)
{
    float *src = malloc(OPERATIONS * (size_t)LONGEST * sizeof *src), *dst = malloc(OPERATIONS * (size_t)LONGEST * sizeof *dst);
    for (int generation = 0, rank = 0, size; (size = size_of(me, &rank)) > 1; generation++) {
        char host[32];
        struct bhvd_error error;
        bhvd_context *ctx;
        bhvd_status status = BHVD_OK;
        snprintf(host, sizeof host, "host %d", me % kind->hosts);
        struct gatherer gatherer = {&board->gatherings[generation], rank, size};
        struct bhvd_context_options options = options_of(&gatherer, kind->transport);
        options.host_id = host;
        options.allreduce_path = kind->path;
        CHECK_STATUS(bhvd_context_create(&options, &ctx, &error), BHVD_OK);
        for (int step = 0; !status; step++) {
            status = run_step(ctx, step, rank, size, src, dst, &error);
            board->steps[me] = status ? 0 : step + 1;
        }
        if (status != BHVD_ERR_PEER_LOST)
            fprintf(stderr, "rank %d: %s\n", rank, error.message);
        CHECK_STATUS(status, BHVD_ERR_PEER_LOST);
        bhvd_context_destroy(ctx);
        board->generations_left[me] = generation + 1;
        while (board->generation == generation)
            usleep(1000);
    }
    free(src);
    free(dst);
    exit(0);
}

// Waits until each living rank has this progress; a process that ends during the wait is a failure.
static void await(const _Atomic int *progress, int at_least, const pid_t *pids)
{
    const int64_t deadline_ms = check_now_ms() + LIMIT_MS;
    for (int i = 0; i < RANKS; i++) {
        while (board->alive[i] && progress[i] < at_least) {
            int status = 0;
            if (waitpid(pids[i], &status, WNOHANG) == pids[i])
                check_fail(__FILE__, __LINE__, "process %d ended with status %#x", i, status);
            CHECK(check_now_ms() < deadline_ms);
            usleep(1000);
        }
    }
}

static void kill_one(unsigned *seed, const pid_t *pids)
{
    int victim;
    do
        victim = rand_r(seed) % RANKS;
    while (!board->alive[victim]);
    usleep(1000 * (20 + rand_r(seed) % 400));
    board->alive[victim] = 0;
    if (rand_r(seed) % 2) {
        kill(pids[victim], SIGSTOP);
        usleep(200000);
    }
    kill(pids[victim], SIGKILL);
    waitpid(pids[victim], NULL, 0);
}

static void run_chaos(const struct chaos *kind, unsigned seed)
{
    pid_t pids[RANKS];
    board = shared_memory(sizeof *board);
    for (int i = 0; i < RANKS; i++)
        board->alive[i] = 1;
    for (int i = 0; i < RANKS; i++)
        if (!(pids[i] = fork_rank()))
            live(i, kind);
    for (int generation = 0; generation < RANKS - 1; generation++) {
        await(board->steps, 1, pids);
        kill_one(&seed, pids);
        await(board->generations_left, generation + 1, pids);
        board->generation = generation + 1;
    }
    for (int i = 0; i < RANKS; i++)
        if (board->alive[i])
            waitpid(pids[i], NULL, 0);
    munmap(board, sizeof *board);
}

TEST(chaos)
{
    const char *text = getenv("BHVD_CHAOS_RUNS");
    const int runs = text ? atoi(text) : 1;
    for (int run = 0; run < runs; run++) {
        printf(" %d", run);
        run_chaos(&KINDS[run % (int)(sizeof KINDS / sizeof KINDS[0])], (unsigned)run + 1);
    }
}
