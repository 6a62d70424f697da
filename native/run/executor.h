// Runs schedules, several at once. Each time links have been looked at, it does what can be done now.
//
// Who owns what:
//     plan               from plan_begin on: the schedule, the list, and what `release` frees. plan_execute and plan_fini free them.
//                        A plan that goes on beside others is kept by the engine until `ended`, then freed by plan_fini.
//     running schedule   schedule_start moves the schedule out of the plan, which then holds an empty one; the rest of the operands stays
//                        the caller's. The executor frees schedule, steps and memory: before `ended`, or in schedule_drop.
//     on failure         schedule_start without memory frees the schedule, fails the run, and does not call `ended`. A failed run ends
//                        all others in executor_abort with its status. What runs without `ended` is dropped by its caller.
// Thread: the engine's.
#ifndef BHVD_EXECUTOR_H
#define BHVD_EXECUTOR_H

#include "run/span.h"
#include "run/group.h"
#include "run/reduction.h"
#include "run/schedule.h"
#include "run/task.h"

struct running_schedule;

static inline unsigned char *place_among(unsigned char *const *spaces, struct place place) { return spaces[place.space] + place.at; }

// What a schedule works on. What it does not use may be left 0.
struct operands {
    struct reduction reduction;
    const struct span_list *list;           // the vector's pieces; the caller keeps it until the schedule is over
    const void *input;
    void *output;
    void (*act)(void *arg, const struct step *step, unsigned char *const *spaces);      // steps on codes
    void *arg;
    const void *state;                      // memory that outlives the schedule; two that share it do not run at once
    uint32_t pairwise;                      // id of the persistent pairwise operation (core/negotiation/pairwise.h); 0: none
    uint64_t execution;                     // whose; 0: of the one that started last
};

// A schedule, or a task, that has not been started: it can go on beside others.
struct plan {
    bool made;
    const struct group *group;
    struct schedule schedule;
    struct operands operands;               // operands.list is `list`, or NULL
    struct span_list list;
    void (*release)(void *arg);             // of operands.arg; NULL: it is somebody else's
    struct task *task;                      // instead of all that
};

// The schedule is to be written into the plan then.
struct schedule *plan_begin(struct plan *plan, const struct group *group);
// Starts it, or its task, waits until it is over, and frees what it has.
bhvd_status plan_execute(struct executor_context *run, struct plan *plan);
void plan_fini(struct executor_context *run, struct plan *plan);

// ended: called when all steps are done or the run has failed; the running schedule is freed then. NULL: the caller asks
// schedule_is_over, and drops it. BHVD_ERR_SYSTEM: no memory.
bhvd_status schedule_start(struct executor_context *run, const struct group *group, struct schedule *schedule,
                           const struct operands *operands, void (*ended)(void *arg, bhvd_status status), void *arg,
                           struct running_schedule **out);
// Starts it, waits until it is over, and frees it.
bhvd_status schedule_execute(struct executor_context *run, const struct group *group, struct schedule *schedule,
                             const struct operands *operands);

bool schedule_is_over(const struct running_schedule *running);
// Frees one that nobody is told of, and that is over, or the run has failed.
void schedule_drop(struct executor_context *run, struct running_schedule *running);

// Does what running schedules and tasks can do now, without looking at links. True when something was.
bool executor_advance(struct executor_context *run);
// The run has failed: ends all running schedules and tasks that nobody waits for.
void executor_abort(struct executor_context *run);
// Is there a running schedule or a task with this state?
bool executor_has_state(const struct executor_context *run, const void *state);
// Is there a running schedule of this group?
bool executor_has_group(const struct executor_context *run, const struct group *group);
// The number of the oldest execution that is under way here, pairwise operations aside; 0: none is.
uint64_t executor_oldest(const struct executor_context *run);
static inline bool executor_is_busy(const struct executor_context *run) { return run->executor.running.head || run->executor.tasks.head; }
void executor_fini(struct executor_context *run);

#endif
