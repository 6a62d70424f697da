// A two-level collective (hierarchy.h) as a task. Each piece passes three stages:
//
//     reduce            within each host, in shared memory        not in broadcast and allgather
//     inter_exchange    between hosts, over links                 the inter-host stage
//     distribute        within each host, in shared memory        not in reducescatter
//
// so that some pieces are on the wire while others are reduced or distributed. Collectives also run concurrently: none waits for a
// message or another member while there is other work.
//
// Within a host all members process pieces in the same order: one after the other is reduced; once `depth` of them have begun, the
// first is distributed before the next is reduced. Without a reduce stage all pieces begin at once.
#pragma once

#include "executor/plan.h"
#include "executor/shared.h"

struct two_level;

// A collective's functions for a piece, from 0.
struct two_level_ops {
    // Begins and returns the pipeline in l->slot. NULL: no such stage.
    struct pipeline *(*reduce)(struct executor *exec, struct two_level *l, size_t piece);
    struct pipeline *(*distribute)(struct executor *exec, struct two_level *l, size_t piece);
    // Plans this member's part between hosts, if any. BHVD_ERR_SYSTEM: the executor has failed.
    bhvd_status (*inter_exchange)(struct executor *exec, struct two_level *l, size_t piece, struct plan *plan);
    // Called after the piece has been distributed; may be NULL.
    void (*end)(struct executor *exec, struct two_level *l, size_t piece);
};

// The first member of every two-level collective.
struct two_level {
    struct task task;
    struct bhvd_sent *sent;             // of its execution
    struct network_cost network;        // and the network's cost, of that execution
    const struct two_level_ops *ops;
    struct group *local;
    int slot;                           // of the group's area
    size_t nbytes;                      // bytes being processed: determines how often links are polled
    size_t count, depth;                // pieces; most that may have begun and not ended
    size_t begun, ended;                // pieces that began the inter-host stage; that are over
    struct inter_host *inter_hosts;     // by piece modulo depth
    struct pipeline *pipeline;          // of the piece being reduced or distributed; NULL: none
    bool is_reducing;
    // Optional data of the collective; freed with the task.
    unsigned char *memory;
    struct span_list list;
    size_t *part;
};

// The piece size in bytes, whole segments, so that a vector has at most `most` pieces.
static inline size_t two_level_piece(size_t nbytes, size_t most)
{
    const size_t segments = (nbytes + SCHEDULE_SEGMENT - 1) / SCHEDULE_SEGMENT;
    return (segments ? (segments + most - 1) / most : 1) * SCHEDULE_SEGMENT;
}

// Allocates `size` bytes, zeros except the struct two_level: `count` pieces, at most `most` begun and not ended. NULL: no memory,
// and the executor has failed.
void *two_level_create(struct executor *exec, size_t size, const struct two_level_ops *ops, struct group *local,
                       size_t nbytes, size_t count, size_t most);
// Makes this task the plan. has_memory false: the collective lacked memory; the executor fails, and the task is freed.
bhvd_status two_level_plan(struct executor *exec, struct two_level *l, bool has_memory, struct plan *plan);
