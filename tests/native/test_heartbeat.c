// Heartbeats: all others detect a stopped rank, whether it has posted anything or not, but not one that merely keeps others
// waiting. Holding a rank's engine stops everything in it, like a stopped process. Filters on both sockets that drop incoming
// packets break a connection without an error on either side.
#include <linux/filter.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "core/context/context.h"
#include "core/context/operation.h"
#include "job.h"

// IMPATIENT_MS: after its next heartbeat, within a second, a rank is known to be at an earlier operation.
enum { LIMIT_MS = 6000, IMPATIENT_MS = 2500 };

static pthread_barrier_t together;  // of the job that needs one

static void short_limit(int rank, struct bhvd_context_options *options)
{
    (void)rank;
    options->heartbeat_timeout_ms = LIMIT_MS;
}

static void sleep_ms(int ms) { usleep((useconds_t)ms * 1000); }

static bhvd_handle *post(bhvd_context *ctx, bhvd_kind kind, const char *name, int process_set, const int32_t *ranks,
                         int rank_count)
{
    static const int64_t shape = 1;
    static _Thread_local float values[8];       // one for each process set
    values[process_set] = 1;
    struct bhvd_tensor tensor = {.src = &values[process_set], .dst = &values[process_set], .shape = &shape, .ndim = 1, .dtype = BHVD_FLOAT32};
    struct bhvd_args args = {
        .kind = kind, .name = name, .tensors = &tensor, .tensor_count = kind == BHVD_ALLREDUCE, .op = BHVD_OP_SUM,
        .process_set = process_set, .prescale_factor = 1.0, .postscale_factor = 1.0, .device = -1, .splits = ranks,
        .split_count = rank_count};
    struct bhvd_error error;
    bhvd_handle *handle = NULL;
    bhvd_post(ctx, &args, &handle, &error);
    return handle;
}

static bhvd_status outcome_of_barrier(bhvd_context *ctx, struct bhvd_error *error)
{
    bhvd_handle *handle = post(ctx, BHVD_BARRIER, "barrier", 0, NULL, 0);
    if (!handle)
        return bhvd_context_status(ctx, error);
    bhvd_status status = bhvd_wait(handle, 60000, error);
    bhvd_handle_drop(handle);
    return status;
}

static void expect_lost(bhvd_context *ctx, int stopped)
{
    struct bhvd_error error;
    char sentence[64];
    snprintf(sentence, sizeof sentence, "rank %d was lost: nothing came from it for", stopped);
    CHECK_STATUS(outcome_of_barrier(ctx, &error), BHVD_ERR_PEER_LOST);
    CHECK_STR_CONTAINS(error.message, sentence);
    CHECK(error.cause == BHVD_CAUSE_SILENT && error.rank == stopped);
}

static void one_is_stopped(struct job *job, int rank, bhvd_context *ctx)
{
    if (rank != job->subject) {
        expect_lost(ctx, job->subject);
        atomic_fetch_add(&job->ready, 1);
        return;
    }
    pthread_mutex_lock(&ctx->engine_lock);
    while (atomic_load(&job->ready) < RANKS - 1)
        sleep_ms(10);
    pthread_mutex_unlock(&ctx->engine_lock);
    struct bhvd_error error;            // it continues, and learns what the others reported
    CHECK_STATUS(outcome_of_barrier(ctx, &error), BHVD_ERR_PEER_LOST);
    CHECK(error.cause == BHVD_CAUSE_SILENT && error.rank == rank);
}

static void all_are_stopped(struct job *job, int rank, bhvd_context *ctx)
{
    (void)job;
    pthread_mutex_lock(&ctx->engine_lock);
    sleep_ms(LIMIT_MS + LIMIT_MS / 4 + 50 * rank);
    pthread_mutex_unlock(&ctx->engine_lock);
    struct bhvd_error error;
    CHECK_STATUS(outcome_of_barrier(ctx, &error), BHVD_OK);
}

static void one_is_late(struct job *job, int rank, bhvd_context *ctx)
{
    if (rank == job->subject)
        sleep_ms(LIMIT_MS + LIMIT_MS / 4);
    struct bhvd_error error;
    CHECK_STATUS(outcome_of_barrier(ctx, &error), BHVD_OK);
}

// ----------------------------------------------------------------------------------- connections between two other ranks

// Newer kernels require CAP_NET_ADMIN.
static bool drop_what_comes(int fd)
{
    struct sock_filter nothing = {.code = BPF_RET | BPF_K, .k = 0};
    const struct sock_fprog program = {.len = 1, .filter = &nothing};
    return setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) == 0;
}

static bool connections_can_break(void)
{
    // User-mode emulators (qemu-user) fill in only the first word, without acknowledgements.
    struct tcp_info info;
    socklen_t size = sizeof info;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(fd >= 0 && getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0);
    const bool can = size > sizeof(uint32_t) && drop_what_comes(fd);
    close(fd);
    return can;
}

// The connection between ranks 1 and 2 breaks; both keep theirs to rank 0.
static void a_connection_breaks(struct job *job, int rank, bhvd_context *ctx)
{
    struct bhvd_error error;
    finish(post(ctx, BHVD_ALLREDUCE, "opens the connections", 0, NULL, 0), BHVD_OK);
    if (rank != 0) {
        pthread_mutex_lock(&ctx->engine_lock);
        CHECK(drop_what_comes(ctx->exec.connections.links[3 - rank].data_channels[0].channel.fd));
        pthread_mutex_unlock(&ctx->engine_lock);
    }
    atomic_fetch_add(&job->ready, 1);
    while (atomic_load(&job->ready) < RANKS)
        sleep_ms(1);
    bhvd_handle *handle = post(ctx, BHVD_ALLREDUCE, "over all connections", 0, NULL, 0);
    CHECK_STATUS(handle ? bhvd_wait(handle, 60000, &error) : bhvd_context_status(ctx, &error), BHVD_ERR_PEER_LOST);
    CHECK_STR_CONTAINS(error.message, "was lost: its host acknowledged nothing for");
    CHECK(error.cause == BHVD_CAUSE_SILENT && (error.rank == 1 || error.rank == 2));
    bhvd_handle_drop(handle);
}

// ----------------------------------------------------------------- waiting for a rank that is busy with another operation

static void rank_0_is_impatient(int rank, struct bhvd_context_options *options)
{
    options->heartbeat_timeout_ms = 60000;
    options->timeout_ms = rank == 0 ? IMPATIENT_MS : 60000;
}

static int add_set(bhvd_context *ctx, const char *name, int a, int b)
{
    const int32_t ranks[] = {a, b};
    struct bhvd_error error;
    bhvd_handle *handle = post(ctx, BHVD_PROCESS_SET_ADD, name, 0, ranks, 2);
    CHECK_STATUS(bhvd_wait(handle, 60000, &error), BHVD_OK);
    int id = (int)bhvd_handle_value(handle);
    bhvd_handle_drop(handle);
    return id;
}

static bool is_requested(bhvd_context *ctx, bhvd_handle *handle)
{
    pthread_mutex_lock(&ctx->engine_lock);
    bool requested = handle->phase > OPERATION_POSTED;
    pthread_mutex_unlock(&ctx->engine_lock);
    return requested;
}

// Ranks 1 and 2 are in a long operation, in which rank 1 is delayed; at the same time rank 0 waits for rank 2.
static void one_is_busy_elsewhere(struct job *job, int rank, bhvd_context *ctx)
{
    (void)job;
    int first = add_set(ctx, "first", 1, 2), second = add_set(ctx, "second", 0, 2);
    struct bhvd_error error;
    bhvd_handle *handles[2] = {NULL, NULL};
    if (rank == 1) {
        handles[0] = post(ctx, BHVD_ALLREDUCE, "long", first, NULL, 0);
        while (!is_requested(ctx, handles[0]))
            sleep_ms(1);
        pthread_mutex_lock(&ctx->engine_lock);
    }
    pthread_barrier_wait(&together);
    if (rank == 2)
        handles[0] = post(ctx, BHVD_ALLREDUCE, "long", first, NULL, 0);
    if (rank != 1)
        handles[1] = post(ctx, BHVD_ALLREDUCE, "short", second, NULL, 0);
    if (rank == 1) {
        sleep_ms(3 * IMPATIENT_MS);
        pthread_mutex_unlock(&ctx->engine_lock);
    }
    for (int i = 0; i < 2; i++) {
        if (handles[i])
            CHECK_STATUS(bhvd_wait(handles[i], 60000, &error), BHVD_OK);
        bhvd_handle_drop(handles[i]);
    }
}

// --------------------------------------------------------------------------------------------------------- heartbeats only

// Rank 1 sends heartbeats twice as often as rank 0's own timer fires.
static void rank_1_is_talkative(int rank, struct bhvd_context_options *options)
{
    rank_0_is_impatient(rank, options);
    if (rank == 1)
        options->heartbeat_timeout_ms = 4000;
}

// Rank 2 is delayed in an operation: rank 0's limit expires, whatever rank 1 sends in the meantime.
static void one_is_held_up(struct job *job, int rank, bhvd_context *ctx)
{
    struct bhvd_error error;
    bhvd_handle *handle = NULL;
    if (rank == job->subject) {
        handle = post(ctx, BHVD_ALLREDUCE, "held up", 0, NULL, 0);
        while (!is_requested(ctx, handle))
            sleep_ms(1);
        pthread_mutex_lock(&ctx->engine_lock);
        atomic_fetch_add(&job->ready, 1);
        while (atomic_load(&job->ready) < RANKS)
            sleep_ms(10);
        pthread_mutex_unlock(&ctx->engine_lock);
    } else {
        while (!atomic_load(&job->ready))
            sleep_ms(1);
        handle = post(ctx, BHVD_ALLREDUCE, "held up", 0, NULL, 0);
    }
    CHECK_STATUS(handle ? bhvd_wait(handle, 60000, &error) : bhvd_context_status(ctx, &error), BHVD_ERR_TIMEOUT);
    CHECK_STR_CONTAINS(error.message, "no progress for 2.5 s inside an operation while waiting for");
    atomic_fetch_add(&job->ready, rank != job->subject);
    bhvd_handle_drop(handle);
}

static void *run_it(void *job)
{
    run_this_job(job);
    return NULL;
}

// All run at once, since they mostly wait.
TEST(who_is_lost_and_who_is_not)
{
    struct job jobs[] = {
        {.transport = "inproc", .body = one_is_stopped, .adjust = short_limit, .subject = 2},
        {.transport = "shm", .body = one_is_stopped, .adjust = short_limit, .subject = 0},
        {.transport = "tcp", .body = one_is_stopped, .adjust = short_limit, .subject = 0},
        {.transport = "auto", .hosts = "AAB", .body = one_is_stopped, .adjust = short_limit, .subject = 1},
        {.transport = "tcp", .body = all_are_stopped, .adjust = short_limit},
        {.transport = "shm", .body = one_is_late, .adjust = short_limit, .subject = 0},
        {.transport = "tcp", .body = one_is_late, .adjust = short_limit, .subject = 1},
        {.transport = "tcp", .body = one_is_busy_elsewhere, .adjust = rank_0_is_impatient, .subject = 1},
        {.transport = "tcp", .hosts = "ABC", .body = one_is_held_up, .adjust = rank_1_is_talkative, .subject = 2},
        {.transport = "tcp", .body = a_connection_breaks, .adjust = short_limit},       // the last one, see below
    };
    enum { JOBS = sizeof jobs / sizeof jobs[0] };
    const int count = JOBS - !connections_can_break();
    if (count < JOBS)
        printf(" (without a connection that breaks: this user, or this kernel, cannot break one)");
    pthread_t threads[JOBS];
    pthread_barrier_init(&together, NULL, RANKS);
    for (int i = 0; i < count; i++)
        pthread_create(&threads[i], NULL, run_it, &jobs[i]);
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&together);
}
