// Two-level reduction of a vector in shards, for hosts with several members each:
//
//     reduce-scatter within each host, in shared memory:   local member s holds the host's sum of shard s
//     work on shard s among its owners, over links:        every owner drives its own sockets
//     allgather within each host, in shared memory
//
// A vector is cut into pieces, so that shards of some are on the wire while others are reduced or distributed.
#pragma once

#include "collective/pipelines.h"
#include "executor/hierarchy.h"
#include "executor/plan.h"

// How a vector is cut.
struct shards_cut {
    size_t nbytes, shard_nbytes;        // of the vector; of a shard, at most
    size_t in_flight;                   // pieces, at most SHARDS_IN_FLIGHT
};

enum { SHARDS_IN_FLIGHT = 4 };

// Bytes of the longest shard.
size_t shards_longest(const struct hierarchy *h, const struct shards_cut *cut);

// Writes the steps of a shard's owners, as a part of the schedule (executor/schedule.h): the shard is the vector, and the input.
typedef void (*write_shard_fn)(const void *arg, struct schedule *schedule, size_t piece, size_t nbytes);

// Writes the schedule of this rank, among its shard's owners. write: called for each shard of this rank that is not empty.
void schedule_shards(struct schedule *schedule, const struct hierarchy *h, const struct shards_cut *cut, write_shard_fn write,
                     const void *arg);

// The operands of the schedule. A primitive's custom steps find in it what they need.
struct shards {
    struct executor *exec;
    const struct hierarchy *h;
    const struct collective *coll;
    struct network_cost network;
    struct shards_cut cut;
    struct reduction within;
    const struct span_list *list;
    struct span_list piece;             // the spans of the piece being reduced or distributed
    size_t *part;                       // and, by local member, bytes of its shard
    union {
        struct reducescatter_pipeline reducing;
        struct allgather_pipeline distributing;
    };
};

// This rank's shard of a piece: a range of the vector.
struct byte_range shards_mine(const struct shards *x, size_t piece);
// The same shard in scratch memory, while the piece is in flight.
struct span shards_span(const struct shards *x, size_t piece, unsigned char *const *buffers);

// Begins a plan in this group, which has a hierarchy, and takes ownership of the list. The caller then writes the schedule, and
// adds operands for its own steps. NULL: no memory; the executor has failed.
struct shards *shards_plan(struct executor *exec, const struct group *group, const struct collective *coll,
                           const struct reduction *within, size_t shard_nbytes, size_t in_flight, struct span_list *list,
                           struct plan *plan);
