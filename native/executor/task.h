// A task is a running schedule (schedule.h). It does what is possible whenever links have been polled (tasks.h).
#pragma once

#include "executor/group.h"
#include "executor/reduction.h"
#include "executor/schedule.h"
#include "executor/shared.h"
#include "executor/span.h"

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

struct step_state;

struct task {
    struct task *next;
    uint64_t execution;                     // its number, or LINK_PAIRWISE and an id
    const struct group *group;
    struct executor *exec;
    struct schedule schedule;
    struct operands operands;
    unsigned char *buffers[BUFFER_COUNT];
    bool packed;                            // the vector is in `memory`; else it is the result of the only tensor
    void *memory;                           // of vector and scratch
    struct step_state *steps;
    int *ready;                             // local steps that wait for nothing, in order
    int ready_begin, ready_end;
    int remaining;                          // unfinished steps
    struct transfer_queue moved;            // finished transfers
    bool has_priority;                      // small enough to go before other executions' messages
    int within;                             // the next step within the host, or the one in progress; schedule.count: none is left
    int slot;                               // of operands.local's area, for these steps
    struct pipeline *pipeline;              // of the one in progress; NULL: none
    int awaited;                            // the global rank of this host that it waits for; -1: none
    struct bhvd_sent *sent;                 // of its execution
    void (*on_complete)(void *arg, bhvd_status status);
    void *arg;
    bool is_complete;
};

// Moves the schedule into a task. NULL: no memory; the schedule was freed, and the executor has failed.
struct task *task_create(struct executor *exec, const struct group *group, struct schedule *schedule,
                         const struct operands *operands);
void task_free(struct executor *exec, struct task *task);

// Does the steps that are possible now, except those within the host. True if there were any.
bool task_advance(struct executor *exec, struct task *task);
// The same for steps within the host.
bool task_advance_within(struct executor *exec, struct task *task);
// Can it work now without a link event?
bool task_can_advance(struct executor *exec, struct task *task);
