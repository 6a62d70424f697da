// Runs schedules, several at once. Each time links have been looked at, it does what can be done now.
//
// Who owns what:
//     plan               from plan_begin on: the schedule, the list, and what `release` frees. plan_execute and plan_fini free them.
//                        A plan that goes on beside others is kept by the engine until `ended`, then freed by plan_fini.
//     running schedule   plan_start moves the schedule out of the plan, which then holds an empty one; the rest of the operands stays
//                        the caller's. The task frees schedule, steps and memory when it is destroyed.
//     on failure         plan_start without memory frees the schedule, fails the run, and does not call `ended`. A failed run ends
//                        all others in executor_abort with its status, at the next look and not within the call that has failed.
//                        What runs without `ended` is dropped by its caller. Links still point to transfers of what was freed: so
//                        nobody looks at them once run->failure is set, and link_fini does not look at transfers either.
//     who makes a plan   leaves it empty when it returns an error.
// Thread: the engine's.
#pragma once

#include "run/span.h"
#include "run/group.h"
#include "run/reduction.h"
#include "run/schedule.h"
#include "run/executor.h"

enum { LOCAL_BYTES = 256 << 10 };       // that a task works on in memory before links are looked at again

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
    uint64_t execution;                     // whose, or LINK_PAIRWISE and an id; 0: of the one that started last
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
bhvd_status plan_execute(struct run *run, struct plan *plan);
void plan_fini(struct run *run, struct plan *plan);

// Starts it, or its task. ended: as of a task, and the plan is the caller's still; NULL: *out is to be dropped. BHVD_ERR_SYSTEM: no memory.
bhvd_status plan_start(struct run *run, struct plan *plan, void (*ended)(void *arg, bhvd_status status), void *arg,
                       struct task **out);
