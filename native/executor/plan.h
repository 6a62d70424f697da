// Runs schedules, several at once. After each poll of the links, each does the work that is possible now, at most LOCAL_BYTES.
//
// Ownership:
//     plan               from plan_begin on: the schedule, the list, and the data of `release`. plan_execute and plan_fini free
//                        them. The engine keeps a concurrent plan until `on_complete` and then calls plan_fini.
//     task               plan_start moves the schedule out of the plan, which then holds an empty one; the rest of the operands
//                        stays the caller's. The task frees schedule, steps and memory when it is destroyed.
//     on failure         plan_start without memory frees the schedule, fails the executor, and does not call `on_complete`. After a
//                        failure tasks_abort completes all other tasks with it, at the next poll, not in the failed call.
//                        The caller destroys tasks without `on_complete`. Links still point to transfers in freed tasks, so nobody
//                        polls links once exec->failure is set, and link_fini does not access transfers either.
//     planning           a function that fills a plan leaves it empty when it returns an error.
// Thread: holder of engine_lock.
#pragma once

#include "executor/span.h"
#include "executor/group.h"
#include "executor/reduction.h"
#include "executor/schedule.h"
#include "executor/task.h"

enum { LOCAL_BYTES = 256 << 10 };       // of local work per task before links are polled again

static inline unsigned char *location_pointer(unsigned char *const *buffers, struct location location)
{
    return buffers[location.buffer] + location.offset;
}

// A schedule's operands. Unused members may be 0.
struct operands {
    struct reduction reduction;
    const struct span_list *list;           // the vector's pieces; the caller keeps it until the schedule is over
    const void *input;
    void *output;
    void (*run_custom_step)(void *arg, const struct step *step, unsigned char *const *buffers);  // STEP_ENCODE and below
    void *arg;
    const void *exclusive_memory;           // memory that outlives the schedule; schedules that share it never run at the same time
    uint64_t execution;                     // its number, or LINK_PAIRWISE and an id; 0: the execution started last
};

// A schedule, or a task, that has not been started and can run concurrently with others.
struct plan {
    bool is_planned;
    const struct group *group;
    struct schedule schedule;
    struct operands operands;               // operands.list is `list`, or NULL
    struct span_list list;
    void (*release)(void *arg);             // frees operands.arg; NULL: owned by someone else
    struct task *task;                      // replaces all members above
};

// The caller then writes the schedule.
struct schedule *plan_begin(struct plan *plan, const struct group *group);
// Starts the schedule or task, waits until it is over, and frees the plan.
bhvd_status plan_execute(struct executor *exec, struct plan *plan);
void plan_fini(struct executor *exec, struct plan *plan);

// Starts it, or its task. on_complete: as for a task; the plan stays the caller's; NULL: the caller destroys *out.
// BHVD_ERR_SYSTEM: no memory.
bhvd_status plan_start(struct executor *exec, struct plan *plan, void (*on_complete)(void *arg, bhvd_status status), void *arg,
                       struct task **out);
