// Effects of the core's threads on the process: they leave its signals alone, and a forked child frees none of their memory.
// And that sleeping threads keep the limits that test_heartbeat.c checks in virtual time.
#include <dirent.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "core/context/context.h"
#include "executor/wait.h"
#include "job.h"

enum { NAP_MS = 3000 };

static _Atomic bool naps_long;      // the progress thread naps for so long that a test notices it

static void nap(const struct connections *c, bool links_too, int timeout_ms, bool must_poll)
{
    pause_in_poll(c, links_too, !links_too && naps_long ? NAP_MS : timeout_ms, must_poll);
}

#define pause_in_poll nap
#include "core/api/progress.c"
#undef pause_in_poll

// The signals that a thread blocks; false if it has ended since it was listed, as connecting threads do.
static bool read_blocked(const char *thread, unsigned long long *blocked)
{
    char path[300], line[200];
    snprintf(path, sizeof path, "/proc/self/task/%s/status", thread);
    FILE *file = fopen(path, "r");
    bool found = false;
    while (file && !found && fgets(line, sizeof line, file))
        found = sscanf(line, "SigBlk: %llx", blocked) == 1;
    if (file)
        fclose(file);
    return found;
}

// The number of threads of this process, and of those that block every signal except faults.
static void count_threads(int *all, int *blocking)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT};
    unsigned long long blocked, spared = 1ull << (SIGKILL - 1) | 1ull << (SIGSTOP - 1);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        spared |= 1ull << (faults[i] - 1);
    *all = *blocking = 0;
    DIR *threads = opendir("/proc/self/task");
    CHECK(threads);
    for (struct dirent *entry; (entry = readdir(threads));)
        if (entry->d_name[0] != '.' && read_blocked(entry->d_name, &blocked)) {
            *all += 1;
            // The first two real-time signals belong to the C library.
            *blocking += (blocked | spared | 3ull << 31) == ~0ull && !(blocked & 1ull << (SIGSEGV - 1));
        }
    closedir(threads);
}

static void look_at_masks(struct job *job, int rank, bhvd_context *ctx)
{
    int all, blocking;
    atomic_fetch_add(&job->ready, 1);
    while (rank == 0 && atomic_load(&job->ready) < RANKS)
        usleep(1000);
    if (rank == 0) {
        // A thread that has not run yet blocks faults, too; and a list of threads may be incomplete while others end.
        const int expected = RANKS;
        count_threads(&all, &blocking);
        for (int tries = 0; tries < 2000 && (blocking < expected || all < blocking + RANKS + 1); tries++) {
            usleep(10000);
            count_threads(&all, &blocking);
        }
        CHECK(blocking >= expected);
        CHECK(all >= blocking + RANKS + 1);         // this program's own: the ranks, and main
        atomic_fetch_add(&job->ready, 1);
    }
    while (atomic_load(&job->ready) <= RANKS)
        usleep(1000);
    (void)ctx;
}

// User-mode emulators (qemu-user) need some of its signals.
static bool kernel_tells_of_masks(void)
{
    sigset_t every, before;
    unsigned long long blocked = 0;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    char self[20];
    snprintf(self, sizeof self, "%d", (int)gettid());
    CHECK(read_blocked(self, &blocked));
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return (blocked | 1ull << (SIGKILL - 1) | 1ull << (SIGSTOP - 1) | 3ull << 31) == ~0ull;
}

TEST(signals_are_for_the_programs_own_threads)
{
    if (!kernel_tells_of_masks()) {
        printf(" (not looked at: /proc does not show all that is blocked)");
        return;
    }
    run_job("tcp", "", NULL, look_at_masks);
    run_job("inproc", "", NULL, look_at_masks);
}

// The state left by a thread that is about to grow a buffer: the old one is freed, the new one not stored yet.
static void fork_meanwhile(struct job *job, int rank, bhvd_context *ctx)
{
    (void)job;
    if (rank != 0)
        return;
    pid_t child = fork();
    if (child == 0) {
        struct link *link = &ctx->exec.connections.links[1];
        void *gone = malloc(100);
        free(gone);
        link->control_out.data = link->control_in.data = gone;
        ctx->names.buckets = gone;
        bhvd_context_after_fork(ctx);
        struct bhvd_error error;
        CHECK_STATUS(bhvd_context_status(ctx, &error), BHVD_ERR_SHUTDOWN);
        CHECK_EQ(link->control.fd, -1);
        bhvd_context_destroy(ctx);
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
}

TEST(a_forked_child_frees_nothing_that_a_thread_may_have_been_changing) { run_job("tcp", "", NULL, fork_meanwhile); }

// ------------------------------------------------------------------------------------------------------------------ switches

enum { OPERATIONS = 100, ROUNDS = 30 };

static long voluntary_switches(const char *thread)
{
    char path[300], line[200];
    long count = 0;
    snprintf(path, sizeof path, "/proc/self/task/%s/status", thread);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file) && sscanf(line, "voluntary_ctxt_switches: %ld", &count) != 1) {
    }
    if (file)
        fclose(file);
    return count;
}

// Context switches of all threads of this process except `callers`.
static long switches_of_others(const _Atomic int *callers)
{
    long sum = 0;
    DIR *threads = opendir("/proc/self/task");
    for (struct dirent *entry; (entry = readdir(threads));) {
        bool is_caller = entry->d_name[0] == '.' || atoi(entry->d_name) == getpid();
        for (int i = 0; i < RANKS; i++)
            is_caller |= atoi(entry->d_name) == callers[i];
        sum += is_caller ? 0 : voluntary_switches(entry->d_name);
    }
    closedir(threads);
    return sum;
}

static _Atomic int callers[RANKS];

static void reduce_while_blocking(bhvd_context *ctx, int times)
{
    const struct bhvd_args args = {.kind = BHVD_ALLREDUCE, .name = "x", .op = BHVD_OP_MAX, .blocking = 1};
    float x = 1;
    for (int i = 0; i < times; i++)
        finish(post_floats(ctx, args, &x, &x, 1), BHVD_OK);
}

// Takes the best round: on busy cores the caller may not run when a message arrives, and the progress thread reads it.
static void block_for_many(struct job *job, int rank, bhvd_context *ctx)
{
    callers[rank] = (int)syscall(SYS_gettid);
    reduce_while_blocking(ctx, 20);
    long best = OPERATIONS;
    for (int round = 0; round < ROUNDS; round++) {
        usleep(5000);
        const long before = switches_of_others(callers);
        reduce_while_blocking(ctx, OPERATIONS);
        const long switches = switches_of_others(callers) - before;
        best = switches < best ? switches : best;
    }
    CHECK(best < OPERATIONS / 2);
    atomic_fetch_add(&job->ready, 1);
    while (atomic_load(&job->ready) < RANKS)
        usleep(1000);
}

TEST(a_blocking_operation_does_not_wake_the_progress_thread) { run_job("tcp", "", NULL, block_for_many); }

// ---------------------------------------------------------------------------------------------------------- two that wait

static bhvd_handle *post_blocking(bhvd_context *ctx, const char *name)
{
    return post_floats(ctx, (struct bhvd_args){.kind = BHVD_BARRIER, .name = name, .blocking = 1}, NULL, NULL, -1);
}

static void *wait_for_second(void *handle)
{
    usleep(5000);               // the other thread runs the engine by now
    finish(handle, BHVD_OK);
    return NULL;
}

static void await_count(struct job *job, int count)
{
    while (atomic_load(&job->ready) < count)
        usleep(500);
}

// Two threads of rank 0 wait for two operations, which the other ranks post one after the other.
static void wait_for_two(struct job *job, int rank, bhvd_context *ctx)
{
    naps_long = true;
    for (int round = 0; round < 30; round++) {
        if (rank) {
            await_count(job, 2 * round + 1);
            usleep(10000);
            finish(post_blocking(ctx, "first"), BHVD_OK);
            await_count(job, 2 * round + 2);
            usleep(2000);
            finish(post_blocking(ctx, "second"), BHVD_OK);
            continue;
        }
        pthread_t other;
        bhvd_handle *first = post_blocking(ctx, "first");
        pthread_create(&other, NULL, wait_for_second, post_blocking(ctx, "second"));
        atomic_fetch_add(&job->ready, 1);
        finish(first, BHVD_OK);
        const int64_t begin_ms = check_now_ms();
        atomic_fetch_add(&job->ready, 1);
        pthread_join(other, NULL);
        CHECK(check_now_ms() - begin_ms < NAP_MS / 2);
    }
    naps_long = false;
}

TEST(a_thread_that_waits_goes_on_when_another_leaves_the_engine) { run_job("tcp", "", NULL, wait_for_two); }

// ------------------------------------------------------------------------------------------------ limits while threads sleep

enum { HEARTBEAT_MS = 400, TIMEOUT_MS = 500, PATIENCE_MS = 60000 };

static void set_heartbeats(int rank, struct bhvd_context_options *options)
{
    (void)rank;
    options->heartbeat_timeout_ms = HEARTBEAT_MS;
}

// Nobody waits for an operation, so only the progress threads can notice it. On a busy machine another rank may seem lost, too.
static void one_engine_is_stopped(struct job *job, int rank, bhvd_context *ctx)
{
    struct bhvd_error error;
    if (rank == job->subject) {
        pthread_mutex_lock(&ctx->engine_lock);
        await_count(job, RANKS - 1);
        pthread_mutex_unlock(&ctx->engine_lock);
        return;
    }
    for (int ms = 0; bhvd_context_status(ctx, &error) == BHVD_OK; ms++) {
        CHECK(ms < PATIENCE_MS);
        usleep(1000);
    }
    CHECK(error.status == BHVD_ERR_PEER_LOST && error.cause == BHVD_CAUSE_SILENT);
    atomic_fetch_add(&job->ready, 1);
}

TEST(idle_ranks_detect_one_that_is_stopped)
{
    static const char *const transports[] = {"shm", "tcp"};
    for (int i = 0; i < 2; i++) {
        struct job job = {.transport = transports[i], .body = one_engine_is_stopped, .adjust = set_heartbeats, .subject = 2 * i};
        run_this_job(&job);
    }
}

static void rank_1_is_talkative(int rank, struct bhvd_context_options *options)
{
    options->heartbeat_timeout_ms = rank == 1 ? 2000 : PATIENCE_MS;
    options->timeout_ms = rank == 0 ? TIMEOUT_MS : PATIENCE_MS;
}

// Rank 2's engine stops when it has requested the sum. Heartbeats of rank 1 end each sleep of rank 0, which notices all the same
// that its limit is over.
static void one_is_held_up(struct job *job, int rank, bhvd_context *ctx)
{
    float value = 1;
    struct bhvd_error error;
    await_count(job, rank != 2);
    bhvd_handle *sum = post_sum(ctx, "sum", &value, 1);
    for (bool is_requested = rank != 2; !is_requested;) {
        pthread_mutex_lock(&ctx->engine_lock);
        is_requested = sum->phase >= OPERATION_REQUESTED;
        if (is_requested) {
            atomic_fetch_add(&job->ready, 1);
            await_count(job, RANKS);
        }
        pthread_mutex_unlock(&ctx->engine_lock);
    }
    CHECK_STATUS(bhvd_wait(sum, PATIENCE_MS, &error), BHVD_ERR_TIMEOUT);
    CHECK_STR_CONTAINS(error.message, "no progress for 0.5 s inside an operation while waiting for");
    atomic_fetch_add(&job->ready, 1);
    bhvd_handle_drop(sum);
}

TEST(heartbeats_do_not_extend_a_sleep_beyond_the_limit)
{
    struct job job = {.transport = "tcp", .hosts = "ABC", .body = one_is_held_up, .adjust = rank_1_is_talkative};
    run_this_job(&job);
}
