// What goes on beside running schedules (executor.h) and is more than one schedule: looked at whenever they are, never waited for but by
// whoever runs one. Thread: the engine's.
#ifndef BHVD_TASK_H
#define BHVD_TASK_H

#include "run/run.h"

// Its first member of whoever has one.
struct task {
    struct task *next;
    uint64_t execution;
    struct sent *sent;                      // of its execution
    struct wire wire;                       // and what that was told of the line
    const void *state;                      // as in struct operands
    bool (*advance)(struct executor_context *run, struct task *task);        // does what can be done now; true: something was
    bool (*can_advance)(struct executor_context *run, struct task *task);    // is there anything to do now?
    void (*destroy)(struct executor_context *run, struct task *task);
    void (*ended)(void *arg, bhvd_status status);
    void *arg;
    bool is_over;
    int awaited;                            // the global rank of this host that it waits for; -1: none
};

// Starts it, for the execution that started last. ended: as a running schedule's; after it the task is destroyed.
void task_start(struct executor_context *run, struct task *task, void (*ended)(void *arg, bhvd_status status), void *arg);
// Starts it, waits until it is over, and destroys it.
bhvd_status task_execute(struct executor_context *run, struct task *task);

// Of all tasks, in the order of their executions: what the executor's functions (executor.h) are of these and of running schedules.
bool tasks_advance(struct executor_context *run);
bool tasks_can_advance(struct executor_context *run);
void tasks_abort(struct executor_context *run);
bool tasks_have_state(const struct executor_context *run, const void *state);
// The global rank of this host that one of them waits for; -1: none does.
int tasks_await(const struct executor_context *run);

#endif
