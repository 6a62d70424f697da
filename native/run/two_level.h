// A collective in two levels (hierarchy.h) as a task. Piece after piece, it
//
//     reduces    within each host, in shared memory           or there is nothing to reduce: broadcast, allgather
//     crosses    between hosts, over links
//     spreads    within each host, in shared memory           or it need not: reducescatter
//
// so that a few pieces are on the wire while others are reduced or spread; and collectives go on beside each other: none waits for a
// message or another member while something else can be done.
//
// Within a host all members do the same in the same order: piece after piece is reduced, and once `depth` of them have begun, the
// first is spread before the next is reduced. What has nothing to reduce begins all pieces at once.
#pragma once

#include "run/plan.h"
#include "run/shared.h"

struct two_level;

// What a collective does with a piece, from 0.
struct two_level_form {
    // Begins the pipeline in l->lane, to be returned. NULL: there is no such step.
    struct pipeline *(*reduce)(struct run *run, struct two_level *l, size_t piece);
    struct pipeline *(*spread)(struct run *run, struct two_level *l, size_t piece);
    // Plans what this member does between hosts, if anything. BHVD_ERR_SYSTEM: the run has failed.
    bhvd_status (*cross)(struct run *run, struct two_level *l, size_t piece, struct plan *plan);
    // It has been spread; may be NULL.
    void (*end)(struct run *run, struct two_level *l, size_t piece);
};

// The first member of whoever has one.
struct two_level {
    struct task task;
    struct sent *sent;                  // of its execution
    struct wire wire;                   // and what that was told of the line
    const struct two_level_form *form;
    struct group *local;
    int lane;                           // of the group's area
    size_t nbytes;                      // of what is worked on: how often links are looked at meanwhile
    size_t count, depth;                // pieces; begun and not ended, at most
    size_t begun, ended;                // pieces that cross, or have; that have been spread
    struct inter_host *inter_hosts;     // by piece modulo depth
    struct pipeline *pipeline;          // of a piece that is being reduced or spread; NULL: none is
    bool is_reducing;
    // Of the collective, which need not have them; freed with the task.
    struct fusion_buffer memory;
    struct span_list list;
    size_t *part;
};

// So many bytes, whole segments, that a vector is at most `most` pieces of them.
static inline size_t two_level_piece(size_t nbytes, size_t most)
{
    const size_t segments = (nbytes + SCHEDULE_SEGMENT - 1) / SCHEDULE_SEGMENT;
    return (segments ? (segments + most - 1) / most : 1) * SCHEDULE_SEGMENT;
}

// One of `size` bytes, zeros but for its levels: `count` pieces, of which at most `most` have begun and not ended. NULL: no memory;
// the run has failed.
void *two_level_create(struct run *run, size_t size, const struct two_level_form *form, struct group *local,
                       size_t nbytes, size_t count, size_t most);
// Makes the plan this task. Not complete: there was no memory for what the collective needs; the run fails, and the task is gone.
bhvd_status two_level_plan(struct run *run, struct two_level *l, bool is_complete, struct plan *plan);
