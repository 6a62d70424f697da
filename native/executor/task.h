// Plans, schedules (schedule.h) with their operands, and tasks, running plans. Many tasks run at the same time: all do what is
// possible whenever links have been polled. Only plan_execute waits. Thread: holder of engine_lock.
//
// Ownership:
//     plan               from plan_begin on: the schedule, the list, and the data of `release`. plan_execute and plan_fini free
//                        them. The engine keeps a concurrent plan until `on_complete` and then calls plan_fini.
//     task               the states of its steps, and memory
//     on failure         plan_start without memory fails the executor, and does not call `on_complete`. After a failure
//                        tasks_abort completes all other tasks with it, at the next poll, not in the failed call.
//                        Links still point to transfers in freed tasks, so nobody polls links once exec->failure is set, and
//                        link_fini does not access transfers either.
//     planning           a function that fills a plan leaves it empty when it returns an error.
#pragma once

#include "executor/shared.h"

static inline unsigned char *location_pointer(unsigned char *const *buffers, struct location location)
{
    return buffers[location.buffer] + location.offset;
}

typedef void (*run_custom_step_fn)(void *arg, const struct step *step, unsigned char *const *buffers);

// A schedule's operands. Unused members may be 0.
struct operands {
    struct reduction reduction;
    const struct span_list *list;           // the vector's pieces; the caller keeps it until the schedule is over
    const void *input;
    void *output;
    run_custom_step_fn run_custom_step;     // STEP_ENCODE and below
    // STEP_REDUCE_WITHIN and STEP_DISTRIBUTE_WITHIN: begins the pipeline, whose memory is arg's, in this slot of `local`.
    struct pipeline *(*begin_pipeline)(void *arg, struct executor *exec, int slot, const struct step *step,
                                       unsigned char *const *buffers);
    struct group *local;
    void *arg;
    const void *exclusive_memory;           // memory that outlives the schedule; schedules that share it never run at the same time
    uint64_t execution;                     // its number, or LINK_PAIRWISE and an id; 0: the execution started last
};

struct plan {
    const struct group *group;              // NULL: nothing is planned
    struct schedule schedule;
    struct operands operands;               // operands.list is `list`, or NULL
    struct span_list list;
    void (*release)(void *arg);             // frees operands.arg; NULL: owned by someone else
};

// The caller then writes the schedule.
struct schedule *plan_begin(struct plan *plan, const struct group *group);
// Starts it, waits until it is over, and frees the plan.
bhvd_status plan_execute(struct executor *exec, struct plan *plan);
// Starts it. on_complete: called after the task is over, or the executor has failed, and the task was freed; until then the plan
// stays where it is. BHVD_ERR_SYSTEM: no memory.
bhvd_status plan_start(struct executor *exec, struct plan *plan, void (*on_complete)(void *arg, bhvd_status status), void *arg);
void plan_fini(struct plan *plan);

// Does the work of the tasks that is possible now, without polling links. True if there was any.
bool tasks_advance(struct executor *exec);
// Can a task work now without a link event? Fails the executor if a member that one waits for has left.
bool tasks_can_advance(struct executor *exec);
// After the executor has failed: completes the tasks that have `on_complete`. That of plan_execute is freed there.
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

struct step_state;

struct task {
    struct task *next;
    uint64_t execution;                     // its number, or LINK_PAIRWISE and an id
    const struct plan *plan;
    struct executor *exec;
    unsigned char *buffers[BUFFER_COUNT];
    bool packed;                            // the vector is in `memory`; else it is the result of the only tensor
    void *memory;                           // of vector and scratch
    struct step_state *steps;
    int *ready;                             // local steps that wait for nothing, in order
    int ready_begin, ready_end;
    int remaining;                          // unfinished steps
    struct transfer_queue moved;            // finished transfers
    bool has_priority;                      // small enough to go before other executions' messages
    int host_step;                          // the next step within the host, or the one in progress; schedule.count: none is left
    int slot;                               // of operands.local's area, for these steps
    struct pipeline *pipeline;              // of the one in progress; NULL: none
    int awaited;                            // the global rank of this host that it waits for; -1: none
    struct bhvd_sent *sent;                 // of its execution
    void (*on_complete)(void *arg, bhvd_status status);     // NULL: plan_execute polls is_complete, and frees it
    void *arg;
    bool is_complete;
};
