// Plans: schedules that have not been started.
//
// Ownership:
//     plan               from plan_begin on: the schedule, the list, and the data of `release`. plan_execute and plan_fini free
//                        them. The engine keeps a concurrent plan until `on_complete` and then calls plan_fini.
//     task               plan_start moves the schedule out of the plan, which then holds an empty one; the rest of the operands
//                        stays the caller's. The task frees schedule, steps and memory at its end.
//     on failure         plan_start without memory frees the schedule, fails the executor, and does not call `on_complete`. After a
//                        failure tasks_abort completes all other tasks with it, at the next poll, not in the failed call.
//                        Links still point to transfers in freed tasks, so nobody polls links once exec->failure is set, and
//                        link_fini does not access transfers either.
//     planning           a function that fills a plan leaves it empty when it returns an error.
// Thread: holder of engine_lock.
#pragma once

#include "executor/task.h"

struct plan {
    bool is_planned;
    const struct group *group;
    struct schedule schedule;
    struct operands operands;               // operands.list is `list`, or NULL
    struct span_list list;
    void (*release)(void *arg);             // frees operands.arg; NULL: owned by someone else
};

// The caller then writes the schedule.
struct schedule *plan_begin(struct plan *plan, const struct group *group);
// Starts it, waits until it is over, and frees the plan.
bhvd_status plan_execute(struct executor *exec, struct plan *plan);
// Starts it. on_complete: as for a task; the plan stays the caller's. BHVD_ERR_SYSTEM: no memory.
bhvd_status plan_start(struct executor *exec, struct plan *plan, void (*on_complete)(void *arg, bhvd_status status), void *arg);
void plan_fini(struct plan *plan);
