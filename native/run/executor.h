// The list of running tasks: schedules (plan.h) and two-level collectives (two_level.h). All advance whenever links have
// been polled. Only task_execute waits for one. Thread: the engine's.
#pragma once

#include "run/run.h"

struct group;

// The first member of every running task.
struct task {
    struct task *next;
    uint64_t execution;                     // its number, or LINK_PAIRWISE and an id
    const struct group *group;              // of a schedule
    const void *exclusive_memory;           // memory that outlives the task; two tasks that share it do not run at the same time
    bool (*advance)(struct run *run, struct task *task);                     // does what is possible now; true: there was some
    bool (*can_advance)(struct run *run, struct task *task);                 // can it work now without a link event? NULL: never
    void (*destroy)(struct run *run, struct task *task);
    void (*ended)(void *arg, bhvd_status status);
    void *arg;
    bool is_over;
    int awaited;                            // the global rank of this host that it waits for; -1: none
};

// ended: called after the task is over, or the run has failed, and it was destroyed. NULL: the caller polls is_over and drops it.
void task_start(struct run *run, struct task *task, void (*ended)(void *arg, bhvd_status status), void *arg);
// Destroys a task without `ended` that is over, or after the run has failed.
void task_drop(struct run *run, struct task *task);
// Starts it, waits until it is over, and destroys it.
bhvd_status task_execute(struct run *run, struct task *task);

// Does the work of the tasks that is possible now, without polling links. True if there was any.
bool executor_advance(struct run *run);
// Can a task work now without a link event?
bool executor_can_advance(struct run *run);
// After the run has failed: ends the tasks that have `ended`. Tasks without it are dropped by their creators.
void executor_abort(struct run *run);
// Is a task with this exclusive memory running? NULL: false.
bool executor_uses_memory(const struct run *run, const void *memory);
// Is a schedule of this group running?
bool executor_has_group(const struct run *run, const struct group *group);
// The number of the oldest execution running here, except pairwise operations; 0: none.
uint64_t executor_oldest(const struct run *run);
// The global rank of this host that a task waits for; -1: none.
int executor_awaited(const struct run *run);
static inline bool executor_is_busy(const struct run *run) { return run->executor.tasks.head; }
void executor_fini(struct run *run);
