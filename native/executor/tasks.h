// The running tasks: schedules that run at the same time. All advance whenever links have been polled. Only task_execute waits.
// Thread: holder of engine_lock.
#pragma once

#include "executor/executor.h"

struct group;
struct task;

// on_complete: called after the task is over, or the executor has failed, and it was freed. NULL: the caller polls is_complete and
// frees it.
void task_start(struct executor *exec, struct task *task, void (*on_complete)(void *arg, bhvd_status status), void *arg);
// Starts it, waits until it is over, and frees it.
bhvd_status task_execute(struct executor *exec, struct task *task);

// Does the work of the tasks that is possible now, without polling links. True if there was any.
bool tasks_advance(struct executor *exec);
// Can a task work now without a link event?
bool tasks_can_advance(struct executor *exec);
// After the executor has failed: completes the tasks that have `on_complete`. The task of task_execute is freed there.
void tasks_abort(struct executor *exec);
// Is a task with this exclusive memory running? NULL: false.
bool tasks_use_memory(const struct executor *exec, const void *memory);
// Does a task run in this group?
bool tasks_use_group(const struct executor *exec, const struct group *group);
// The number of the oldest execution running here, except pairwise operations; 0: none.
uint64_t tasks_oldest_execution(const struct executor *exec);
// The global rank of this host that a task waits for; -1: none.
int tasks_awaited_rank(const struct executor *exec);
static inline bool tasks_are_running(const struct executor *exec) { return exec->tasks.head; }
void tasks_fini(struct executor *exec);
