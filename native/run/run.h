// What executes, without what decides: links, memory shared with the host's other ranks, kernels, scratch memory, and the first
// error. It knows positions in groups (group.h) and what is to be done (work.h), but no names, requests or coordinators.
//
// While an execution waits, its owner's business must go on: those are the callbacks, a few functions that the owner supplies.
// Thread: the engine's, but for what says otherwise.
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "base/fifo.h"
#include "kernel/kernel.h"
#include "run/fusion.h"
#include "run/schedule.h"
#include "run/work.h"
#include "transport/connect.h"

// How long nothing has moved that an operation needs.
struct no_progress {
    int64_t since_ns;                   // 0: not looked at yet
    uint64_t moved;
};

// What is under way, in the order in which it was started (executor.h).
struct executor {
    struct FIFO(struct task) tasks;
    struct no_progress still;
};

// What goes on above while something here waits. `owner` is the run's, of which nothing is known here.
struct executor_callbacks {
    link_frame_fn on_frame;                                     // a peer's control frame; its first argument is the owner
    bool (*poll)(bhvd_context *owner, bool look_at_sockets);    // one look at everything that can move, links included; did something?
    void (*keep_alive)(bhvd_context *owner);                    // after looking: who is to be told that this rank lives, who was silent?
    void (*check_timers)(bhvd_context *owner);                  // at the clock: that, and whatever else is due
    bool (*needs_poll)(bhvd_context *owner);                    // would a thread that sleeps in poll() miss something? MPI and GPUs have no descriptor
    bool (*others_are_earlier)(const bhvd_context *owner);    // may those that are waited for still be busy with something else?
    void (*failed)(bhvd_context *owner, const struct bhvd_error *error);    // the first error, once
};

// How this rank writes what others read in memory that they share: through its caches, or past them (shared.c).
struct writes {
    bool streamed;
    uint32_t count;                     // of those long enough to be looked at
    int64_t least_ns[2];                // for a MiB, of those looked at last: through, past
};

// How an allreduce is done: chosen in core/execution/select.c and allreduce_links.c, or forced by BAGUA_HVD_ALLREDUCE.
enum allreduce_path {
    ALLREDUCE_CHOSEN,
    ALLREDUCE_SHARED,           // shared memory: groups on one host
    ALLREDUCE_RING,
    ALLREDUCE_DOUBLING,
    ALLREDUCE_HALVING,
    ALLREDUCE_HIERARCHICAL      // groups on several hosts, some with several members
};

struct run {
    struct connections connections;
    struct kernel_table kernels;
    enum allreduce_path allreduce_path;
    struct wire wire;                   // of the execution that was started last
    int timeout_ms;                     // without progress inside an execution
    const struct executor_callbacks *callbacks;
    bhvd_context *owner;
    pthread_mutex_t failure_lock;       // for writing `failure`, and for reading it on other threads
    struct bhvd_error failure;          // why nothing can be executed any more
    struct writes writes;
    struct fusion fusion;
    struct executor executor;           // executor.h
    int spin_limit, yield_limit;        // rounds of looking, and of yielding, before the engine sleeps
    int sleep_ms;                       // at most
    int64_t returned_ns;                // when this process went on after it had been stopped; 0: never was
    uint32_t waits_for_nothing;         // calls of run_until that did not wait
    uint64_t messages_moved;            // bytes of them, both ways
    bool waits_for_gpu;                 // which no descriptor tells of
    _Atomic int waiting;                // threads that block for an operation
    _Atomic uint64_t payload_sent, payload_received;    // in shared memory; links count their own
    struct sent *sent;                  // of the execution that is being started or runs to its end; NULL: there is none
    _Atomic uint64_t nccl_payload;      // of tensors that NCCL took
};

// Of a run that is all zeros; not its connections, which are the owner's to open and to close.
void run_init(struct run *run, const struct executor_callbacks *callbacks, bhvd_context *owner);
void run_fini(struct run *run);               // after executor_fini
// In a forked child: fresh locks.
void run_after_fork(struct run *run);

// Nothing can be executed any more, by another rank's doing. The first failure stays, since later ones are consequences: returns its
// status.
bhvd_status run_blame(struct run *run, bhvd_status status, bhvd_cause cause, int rank, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
// The same, as nobody's doing.
#define run_fail(run, status, ...) run_blame(run, status, BHVD_CAUSE_NONE, -1, __VA_ARGS__)
bhvd_status run_fail_with(struct run *run, const struct bhvd_error *error);
// A peer sent something that makes no sense.
bhvd_status run_fail_protocol(struct run *run, int rank);
// For any thread.
struct bhvd_error run_failure(struct run *run);

// In shared memory the others read so much here, and this rank so much of them.
static inline void run_shared_bytes(struct run *run, uint64_t sent, uint64_t received)
{
    run->payload_sent += sent;
    run->payload_received += received;
    if (run->sent)
        run->sent->shm += sent;
}
// A message of the execution's: links count what they send for all.
static inline void run_message_bytes(const struct run *run, const struct link *link, uint64_t nbytes)
{
    if (run->sent)
        *link_medium(link, &run->sent->shm, &run->sent->tcp, &run->sent->mpi) += nbytes;
}

// links.c. Moves what can be moved over all links. True when something did.
bool run_advance_links(struct run *run, bool look_at_sockets);
// Is something under way over a link that no descriptor tells of?
bool run_links_need_poll(const struct run *run);
// Is there something to do that can be seen without a system call?
bool run_links_are_ready(struct run *run);
// Do frames wait for room in a ring?
bool run_links_wait_for_room(const struct run *run);
// Has a rank of this host died? For before and after sleeps: a system call.
void run_look_at_liveness(struct run *run);

// wait.c. Waits until ready(arg) is > 0. Negative: ready has failed the run. waiting_for: the global rank that it waits for, for
// the message; -1 when several.
typedef int (*run_ready_fn)(struct run *run, void *arg);
bhvd_status run_until(struct run *run, run_ready_fn ready, void *arg, int waiting_for);
// The same for what only a GPU knows, so that the engine looks again and again instead of sleeping. A GPU may be busy for a
// while with what it was given before, and NCCL's first connections take long: the limit is GPU_TIMEOUTS times as long.
bhvd_status run_until_gpu(struct run *run, run_ready_fn ready, void *arg);
enum { GPU_TIMEOUTS = 20 };
int64_t run_gpu_timeout_ns(const struct run *run);
// Fails the run when nothing has moved for too long that the schedules under way wait for.
void run_look_at_schedules(struct run *run);
