// Runs schedules, as many at once as have been started: what can be done now is done whenever links have been looked at.
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
    const struct span_list *list;           // of which the vector is made; kept alive by the caller until the running schedule is over
    const void *input;
    void *output;
    void (*act)(void *arg, const struct step *step, unsigned char *const *spaces);      // steps on codes
    void *arg;
    const void *state;                      // memory that outlives the running schedule, and that no two running schedules may have at once
    uint32_t pairwise;                      // its messages are this pairwise operation's (core/negotiation/pairwise.h); 0: an execution's
    uint64_t execution;                     // whose; 0: of the one that started last
};

// A running schedule that has not been started: what can go on beside others.
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

// Starts what the schedule says, which is the running schedule's from now on. ended: called when all is done or the run has failed, by
// whoever lets the executor go on; after it the running schedule is gone. NULL: the caller looks (schedule_is_over), and drops it.
// BHVD_ERR_SYSTEM: no memory; the run has failed, and ended is not called.
bhvd_status schedule_start(struct executor_context *run, const struct group *group, struct schedule *schedule,
                           const struct operands *operands,
                         void (*ended)(void *arg, bhvd_status status), void *arg, struct running_schedule **out);
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
static inline bool executor_is_busy(const struct executor_context *run) { return run->executor.head || run->executor.tasks; }
void executor_fini(struct executor_context *run);

#endif
