// The executor runs collectives that the engine (core/engine/engine.h) chooses. It has links, memory shared with the
// host's other ranks, kernels, scratch memory, running tasks (task.h), and the first error. It knows positions in groups (group.h)
// and collectives (collective.h), but no names or requests.
//
// While an execution waits, the engine's other work must continue: it supplies a few functions for that, the callbacks.
// Thread: holder of engine_lock, except where noted.
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "executor/collective.h"
#include "executor/schedule.h"
#include "kernel/kernel.h"
#include "transport/connect.h"

// Detects that an operation has made no progress for too long.
struct progress_timer {
    int64_t since_ns;                   // 0: not checked yet
    uint64_t moved;
};

// The engine's functions to call while something here waits. The context is opaque here.
struct executor_callbacks {
    link_frame_fn on_frame;                                     // a peer's control frame; its first argument is the context
    bool (*poll)(bhvd_context *ctx, bool poll_sockets);         // polls everything, links included; true: something moved
    void (*keep_alive)(bhvd_context *ctx);                      // call after polling: sends due heartbeats, checks for silent ranks
    void (*check_timers)(bhvd_context *ctx);                    // call when time has passed: that and all other timers
    bool (*needs_poll)(bhvd_context *ctx);                      // must a sleeping thread poll? MPI and GPUs have no descriptor
    bool (*others_are_earlier)(const bhvd_context *ctx);        // may the awaited ranks still be busy with an earlier execution?
    void (*failed)(bhvd_context *ctx, const struct bhvd_error *error);      // the first error, called once
};

// How this rank writes to shared memory that others read: through its caches, or with non-temporal stores (shared.c).
struct writes {
    bool streamed;
    uint32_t count;                     // of writes long enough to be timed
    int64_t least_ns[2];                // per MiB, in the current series: through caches, non-temporal
};

// Algorithm of an allreduce over links: chosen in allreduce_links.c, or forced by BAGUA_HVD_ALLREDUCE. If forced, no
// collective uses shared memory (core/engine/execute.c).
enum allreduce_path { ALLREDUCE_CHOSEN, ALLREDUCE_RING, ALLREDUCE_DOUBLING, ALLREDUCE_HALVING };

struct executor {
    struct connections connections;
    struct kernel_table kernels;
    enum allreduce_path allreduce_path;
    struct network_cost network;        // of the execution being planned now
    int timeout_ms;                     // limit without progress inside an execution
    const struct executor_callbacks *callbacks;
    bhvd_context *ctx;
    pthread_mutex_t failure_lock;       // for writing `failure`, and for reading it on other threads
    struct bhvd_error failure;          // the reason why nothing can be executed any more
    struct writes writes;
    struct block_pool memory;           // freed fusion buffers, which hold several tensors as one vector, and scratch
    struct FIFO(struct task) tasks;     // running, in the order in which they were started (task.h)
    struct progress_timer timer;        // of all of them
    int spin_limit, yield_limit;        // rounds of polling, and of yielding, before the engine sleeps
    int sleep_ms;                       // longest sleep
    int64_t returned_ns;                // when this process continued after it had been stopped; 0: never
    uint32_t waits_for_nothing;         // calls of executor_wait that did not wait
    uint64_t moved;                     // grows with each byte of payload, and with each step within the host
    bool waits_for_gpu;                 // for a GPU, which no descriptor reports
    _Atomic int waiting;                // threads that block for an operation
    _Atomic uint64_t payload_sent, payload_received;    // in shared memory; links count their own
    struct bhvd_sent *sent;             // of the execution that is being started or run to completion; NULL: none
    _Atomic uint64_t nccl_payload;      // bytes of tensors given to NCCL
};

// For an executor that is all zeros. Does not open or close connections: the engine does.
void executor_init(struct executor *exec, const struct executor_callbacks *callbacks, bhvd_context *ctx);
void executor_fini(struct executor *exec);    // after tasks_fini
// In a forked child: fresh locks.
void executor_after_fork(struct executor *exec);

// When the executor fails. Any function may fail it, also below a link's or a task's `advance`:
//
//     0. detection          link_advance -> fail_link (poll.c: hang-up or error), departure_on_goodbye (another rank has noticed),
//                           heartbeat.c, stall.c, pairwise.c, wait.c, pipeline_can_advance (shared.c), nccl_poll; no memory
//     1. executor_fail_with keeps the first error and calls `failed` (core/engine/engine.c), which completes all operations that
//                           are not being executed and, unless this rank leaves, sends a goodbye and aborts NCCL
//     2. the stack unwinds  each loop over links or tasks checks exec->failure; nothing is freed below an `advance`
//     3. next engine_poll   tasks_abort frees every task that has `on_complete`, with its schedule and memory (executor/task.h),
//                           and completes its operations with the failure. Links do not advance any more: transfers may dangle.
//     4. executor_wait      returns the failure, or BHVD_OK if ready(arg) is > 0 nevertheless; its caller frees the task it
//                           started, and completes that execution, always with the failure (start_or_complete in engine.c)
//     5. operation_complete wakes sleeping callers and completion lists; bhvd_wait returns the operation's error
//
// So every execution completes once: in 1 if it has not begun, in 3 if it runs beside others, in 4 if it runs to its end. Tasks
// without `on_complete` belong to plan_execute. A new loop over links or tasks must check exec->failure
// before each element; a new owner of transfers may free them only after they have ended or the executor has failed.

// Fails the executor because of another rank: nothing can be executed any more. The first failure is kept, since later ones are
// consequences. Returns its status.
bhvd_status executor_blame(struct executor *exec, bhvd_status status, bhvd_cause cause, int rank, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
// The same, without blaming a rank.
#define executor_fail(exec, status, ...) executor_blame(exec, status, BHVD_CAUSE_NONE, -1, __VA_ARGS__)
bhvd_status executor_fail_with(struct executor *exec, const struct bhvd_error *error);
// A peer violated the protocol.
bhvd_status executor_fail_protocol(struct executor *exec, int rank);
// A rank said goodbye too early.
bhvd_status executor_fail_departed(struct executor *exec, int rank);
// Allocates the result of a tensor posted with dst NULL and points dst at it. BHVD_ERR_SYSTEM: no memory; the executor has failed.
bhvd_status executor_allocate_result(struct executor *exec, struct tensor *tensor, int64_t dim0);
// Memory for an execution or a step, 64-byte aligned; NULL: no memory. Kept after its release until it has been unused for
// MEMORY_IDLE_MS.
void *executor_acquire(struct executor *exec, size_t nbytes);
static inline void executor_release(struct executor *exec, void *data) { block_pool_release(&exec->memory, data); }
enum { MEMORY_IDLE_MS = 10000 };
// For any thread.
struct bhvd_error executor_failure(struct executor *exec);

// Counts bytes in shared memory: `sent` that others read from this rank, `received` that it read from them.
static inline void executor_count_shared(struct executor *exec, uint64_t sent, uint64_t received)
{
    exec->payload_sent += sent;
    exec->payload_received += received;
    if (exec->sent)
        exec->sent->shm_bytes += sent;
}
// Counts a message for its execution; links count all that they send.
static inline void executor_count_message(const struct executor *exec, const struct link *link, uint64_t nbytes)
{
    if (exec->sent)
        *link_medium(link, &exec->sent->shm_bytes, &exec->sent->tcp_bytes, &exec->sent->mpi_bytes) += nbytes;
}

// poll.c. Moves data over all links. True if something moved.
bool executor_poll(struct executor *exec, bool poll_sockets);
// Is data in flight over a link that no descriptor reports?
bool executor_needs_poll(const struct executor *exec);
// Is there work that can be detected without a system call? Asks tasks_can_advance(), which may fail the executor.
bool executor_has_work(struct executor *exec);
// Do frames wait for space in a ring?
bool executor_waits_for_room(const struct executor *exec);
// Has a rank of this host died? A system call, for before and after sleeps.
void executor_check_liveness(struct executor *exec);

// wait.c. Waits until ready(arg) is > 0: then BHVD_OK, even after a failure. Negative: ready has failed the executor.
// waiting_for: the awaited global rank, for the error message; -1: several. Polls meanwhile: frames arrive, tasks and their
// executions complete, pairwise operations start, and a failure aborts all tasks with `on_complete`; no other execution begins.
typedef int (*executor_ready_fn)(struct executor *exec, void *arg);
bhvd_status executor_wait(struct executor *exec, executor_ready_fn ready, void *arg, int waiting_for);
// The same for work on a GPU, which the engine polls instead of sleeping. A GPU may be busy with earlier work, and NCCL's
// first connections take long: the limit is GPU_TIMEOUTS times as long.
bhvd_status executor_wait_gpu(struct executor *exec, executor_ready_fn ready, void *arg);
enum { GPU_TIMEOUTS = 20 };
int64_t executor_gpu_timeout_ns(const struct executor *exec);
// Fails the executor if the running schedules have made no progress for too long.
void executor_check_progress(struct executor *exec);

// How values of several ranks are combined.
struct reduction {
    bhvd_dtype dtype;
    kernel_reduce_fn reduce;
    kernel_scale_fn scale;
    double prescale, postscale;         // 1.0: no scaling
};

static inline struct reduction reduction_of(const struct kernel_table *kernels, enum kernel_reduction kind, bhvd_dtype dtype,
                                            double prescale, double postscale)
{
    return (struct reduction){dtype, kernels->reduce[kind][dtype], kernels->scale[dtype], prescale, postscale};
}

// The reduction of values of `size` ranks. Average is a sum whose postscale includes 1 / size (one multiplication, not
// two).
static inline struct reduction reduction_by(const struct executor *exec, const struct collective *coll, bhvd_dtype dtype, int size)
{
    const enum kernel_reduction kind = coll->args.op == BHVD_OP_MIN       ? KERNEL_MIN
                                       : coll->args.op == BHVD_OP_MAX     ? KERNEL_MAX
                                       : coll->args.op == BHVD_OP_PRODUCT ? KERNEL_PRODUCT
                                                                            : KERNEL_SUM;
    return reduction_of(&exec->kernels, kind, dtype, coll->args.prescale_factor, collective_sum_factor(coll, size));
}
