// The list of what is under way: running schedules (plan.h) and two-level collectives (two_level.h). All advance whenever links have
// been polled. Only task_execute waits for one. Thread: the engine's.
#pragma once

#include "run/run.h"

struct group;

// The first member of what is under way.
struct task {
    struct task *next;
    uint64_t execution;                     // its number, or LINK_PAIRWISE and an id
    const struct group *group;              // of a schedule
    const void *state;                      // memory that outlives it; two that share it are not under way at once
    bool (*advance)(struct run *run, struct task *task);                     // does what can be done now; true: something was
    bool (*can_advance)(struct run *run, struct task *task);                 // is there anything to do now that no link tells of? NULL: never
    void (*destroy)(struct run *run, struct task *task);
    void (*ended)(void *arg, bhvd_status status);
    void *arg;
    bool is_over;
    int awaited;                            // the global rank of this host that it waits for; -1: none
};

// ended: called when it is over or the run has failed, after it was destroyed. NULL: the caller asks is_over, and drops it.
void task_start(struct run *run, struct task *task, void (*ended)(void *arg, bhvd_status status), void *arg);
// Destroys one that nobody is told of, and that is over, or the run has failed.
void task_drop(struct run *run, struct task *task);
// Starts it, waits until it is over, and destroys it.
bhvd_status task_execute(struct run *run, struct task *task);

// Does what all can do now, without looking at links. True when something was.
bool executor_advance(struct run *run);
// Could one do something now that no link tells of?
bool executor_can_advance(struct run *run);
// The run has failed: ends the tasks that have `ended`. One without is dropped by whoever started it.
void executor_abort(struct run *run);
// Is one with this state under way?
bool executor_has_state(const struct run *run, const void *state);
// Is a schedule of this group?
bool executor_has_group(const struct run *run, const struct group *group);
// The number of the oldest execution that is under way here, pairwise operations aside; 0: none is.
uint64_t executor_oldest(const struct run *run);
// The global rank of this host that one of them waits for; -1: none does.
int executor_awaited(const struct run *run);
static inline bool executor_is_busy(const struct run *run) { return run->executor.tasks.head; }
void executor_fini(struct run *run);
