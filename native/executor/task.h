// A task is a collective that runs beside others: a schedule (plan.h) or a two-level collective (two_level.h). All tasks advance
// whenever links have been polled. Only task_execute waits for one. Thread: holder of engine_lock.
#pragma once

#include "executor/executor.h"

struct group;

// The first member of every running task.
struct task {
    struct task *next;
    uint64_t execution;                     // its number, or LINK_PAIRWISE and an id
    const struct group *group;              // of a schedule
    const void *exclusive_memory;           // memory that outlives the task; two tasks that share it do not run at the same time
    bool (*advance)(struct executor *exec, struct task *task);               // does what is possible now; true: there was some
    bool (*can_advance)(struct executor *exec, struct task *task);           // can it work now without a link event? NULL: never
    void (*destroy)(struct executor *exec, struct task *task);
    void (*on_complete)(void *arg, bhvd_status status);
    void *arg;
    bool is_complete;
    int awaited;                            // the global rank of this host that it waits for; -1: none
};

// on_complete: called after the task is over, or the executor has failed, and it was destroyed. NULL: the caller polls is_complete
// and destroys it.
void task_start(struct executor *exec, struct task *task, void (*on_complete)(void *arg, bhvd_status status), void *arg);
// Destroys a task without `on_complete` that is over, or after the executor has failed.
void task_destroy(struct executor *exec, struct task *task);
// Starts it, waits until it is over, and destroys it.
bhvd_status task_execute(struct executor *exec, struct task *task);

// Does the work of the tasks that is possible now, without polling links. True if there was any.
bool tasks_advance(struct executor *exec);
// Can a task work now without a link event?
bool tasks_can_advance(struct executor *exec);
// After the executor has failed: completes the tasks that have `on_complete`. Tasks without it are destroyed by their creators.
void tasks_abort(struct executor *exec);
// Is a task with this exclusive memory running? NULL: false.
bool tasks_use_memory(const struct executor *exec, const void *memory);
// Is a schedule of this group running?
bool tasks_use_group(const struct executor *exec, const struct group *group);
// The number of the oldest execution running here, except pairwise operations; 0: none.
uint64_t tasks_oldest_execution(const struct executor *exec);
// The global rank of this host that a task waits for; -1: none.
int tasks_awaited_rank(const struct executor *exec);
static inline bool tasks_are_running(const struct executor *exec) { return exec->tasks.head; }
void tasks_fini(struct executor *exec);
