// The executor: runs collectives that its owner chooses. It has links, memory shared with the host's other ranks, kernels, scratch
// memory, and the first error. It knows positions in groups (group.h) and operations (work.h), but no names or requests.
//
// While an execution waits, the owner's other work must continue: it supplies a few functions for that, the callbacks.
// Thread: the engine's, except where noted.
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "base/fifo.h"
#include "kernel/kernel.h"
#include "run/buffer_pool.h"
#include "run/schedule.h"
#include "run/work.h"
#include "transport/connect.h"

// Detects that an operation has made no progress for too long.
struct no_progress {
    int64_t since_ns;                   // 0: not checked yet
    uint64_t moved;
};

// Running tasks, in the order in which they were started (executor.h).
struct executor {
    struct FIFO(struct task) tasks;
    struct no_progress still;
};

// The owner's functions to call while something here waits. `owner` is opaque here.
struct executor_callbacks {
    link_frame_fn on_frame;                                     // a peer's control frame; its first argument is the owner
    bool (*poll)(bhvd_context *owner, bool look_at_sockets);    // polls everything, links included; true: something moved
    void (*keep_alive)(bhvd_context *owner);                    // call after polling: sends due heartbeats, checks for silent ranks
    void (*check_timers)(bhvd_context *owner);                  // call when time has passed: that and all other timers
    bool (*needs_poll)(bhvd_context *owner);                    // must a sleeping thread poll? MPI and GPUs have no descriptor
    bool (*others_are_earlier)(const bhvd_context *owner);      // may the awaited ranks still be busy with an earlier execution?
    void (*failed)(bhvd_context *owner, const struct bhvd_error *error);    // the first error, called once
};

// How this rank writes to shared memory that others read: through its caches, or with non-temporal stores (shared.c).
struct writes {
    bool streamed;
    uint32_t count;                     // of writes long enough to be timed
    int64_t least_ns[2];                // per MiB, in the current series: through caches, non-temporal
};

// Algorithm of an allreduce: chosen in core/execution/select.c and allreduce_links.c, or forced by BAGUA_HVD_ALLREDUCE.
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
    struct wire wire;                   // of the execution started last
    int timeout_ms;                     // limit without progress inside an execution
    const struct executor_callbacks *callbacks;
    bhvd_context *owner;
    pthread_mutex_t failure_lock;       // for writing `failure`, and for reading it on other threads
    struct bhvd_error failure;          // the reason why nothing can be executed any more
    struct writes writes;
    struct buffer_pool buffers;
    struct executor executor;           // executor.h
    int spin_limit, yield_limit;        // rounds of polling, and of yielding, before the engine sleeps
    int sleep_ms;                       // longest sleep
    int64_t returned_ns;                // when this process continued after it had been stopped; 0: never
    uint32_t waits_for_nothing;         // calls of run_until that did not wait
    uint64_t messages_moved;            // payload bytes, both directions
    bool waits_for_gpu;                 // for a GPU, which no descriptor reports
    _Atomic int waiting;                // threads that block for an operation
    _Atomic uint64_t payload_sent, payload_received;    // in shared memory; links count their own
    struct sent *sent;                  // of the execution that is being started or run to completion; NULL: none
    _Atomic uint64_t nccl_payload;      // bytes of tensors given to NCCL
};

// For a run that is all zeros. Does not open or close connections: the owner does.
void run_init(struct run *run, const struct executor_callbacks *callbacks, bhvd_context *owner);
void run_fini(struct run *run);               // after executor_fini
// In a forked child: fresh locks.
void run_after_fork(struct run *run);

// When the run fails. Any function may fail it, also below a link's or a task's `advance`:
//
//     1. run_fail_with      keeps the first error and calls `failed` (core/execution/engine.c), which ends all operations that are not
//                           being executed, tells the other ranks, and aborts NCCL's communicators
//     2. the stack unwinds  each loop over links or tasks checks run->failure; nothing is freed below an `advance`
//     3. next engine_poll   executor_abort ends every task that has `ended`: frees its schedule and memory (run/plan.h), then ends its
//                           operations with the failure. Links are not advanced any more, so their transfers may dangle.
//     4. run_until          returns the failure; its caller frees the task that it started, and ends that execution
//
// So every execution is ended once: in 1 if it has not begun, in 3 if it runs beside others, in 4 if it runs to its end. Tasks
// without `ended` belong to the task or function that started them. A new loop over links or tasks must check run->failure
// before each element; a new owner of transfers may free them only after they have ended or the run has failed.

// Fails the run because of another rank: nothing can be executed any more. The first failure is kept, since later ones are
// consequences. Returns its status.
bhvd_status run_blame(struct run *run, bhvd_status status, bhvd_cause cause, int rank, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
// The same, without blaming a rank.
#define run_fail(run, status, ...) run_blame(run, status, BHVD_CAUSE_NONE, -1, __VA_ARGS__)
bhvd_status run_fail_with(struct run *run, const struct bhvd_error *error);
// A peer violated the protocol.
bhvd_status run_fail_protocol(struct run *run, int rank);
// A rank said goodbye too early.
bhvd_status run_fail_left(struct run *run, int rank);
// Allocates the result of a tensor posted with dst NULL and points dst at it. BHVD_ERR_SYSTEM: no memory; the run has failed.
bhvd_status run_allocate_result(struct run *run, struct tensor *tensor, int64_t dim0);
// For any thread.
struct bhvd_error run_failure(struct run *run);

// Counts bytes in shared memory: `sent` that others read from this rank, `received` that it read from them.
static inline void run_shared_bytes(struct run *run, uint64_t sent, uint64_t received)
{
    run->payload_sent += sent;
    run->payload_received += received;
    if (run->sent)
        run->sent->shm += sent;
}
// Counts a message for its execution; links count all that they send.
static inline void run_message_bytes(const struct run *run, const struct link *link, uint64_t nbytes)
{
    if (run->sent)
        *link_medium(link, &run->sent->shm, &run->sent->tcp, &run->sent->mpi) += nbytes;
}

// links.c. Moves data over all links. True if something moved.
bool run_advance_links(struct run *run, bool look_at_sockets);
// Is data in flight over a link that no descriptor reports?
bool run_links_need_poll(const struct run *run);
// Is there work that can be detected without a system call?
bool run_links_are_ready(struct run *run);
// Do frames wait for space in a ring?
bool run_links_wait_for_room(const struct run *run);
// Has a rank of this host died? A system call, for before and after sleeps.
void run_look_at_liveness(struct run *run);

// wait.c. Waits until ready(arg) is > 0. Negative: ready has failed the run. waiting_for: the awaited global rank, for
// the error message; -1: several.
typedef int (*run_ready_fn)(struct run *run, void *arg);
bhvd_status run_until(struct run *run, run_ready_fn ready, void *arg, int waiting_for);
// The same for work on a GPU, which the engine polls instead of sleeping. A GPU may be busy with earlier work, and NCCL's
// first connections take long: the limit is GPU_TIMEOUTS times as long.
bhvd_status run_until_gpu(struct run *run, run_ready_fn ready, void *arg);
enum { GPU_TIMEOUTS = 20 };
int64_t run_gpu_timeout_ns(const struct run *run);
// Fails the run if the running schedules have made no progress for too long.
void run_look_at_schedules(struct run *run);
