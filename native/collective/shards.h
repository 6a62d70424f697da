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

// The operands: the first member of an operation's own, which the plan's operands point to.
struct shards {
    const struct hierarchy *h;
    struct reduction within;
    struct span_list piece;             // the spans of the piece being reduced or distributed
    size_t *part;                       // and, by local member, bytes of its shard
    const struct span_list *list;
    union {
        struct reducescatter_pipeline reducing;
        struct allgather_pipeline distributing;
    };
};

enum { SHARDS_IN_FLIGHT = 4 };          // at most

// Writes the steps of a shard's owners, as a part of the schedule (executor/schedule.h): the shard is the vector, and the input.
// begin: the shard's offset in the operation's vector, in bytes.
typedef void (*write_shard_fn)(void *arg, struct schedule *schedule, size_t piece, size_t begin, size_t nbytes);

// How a vector of `nbytes` is cut.
struct shards_cut {
    size_t nbytes, shard_nbytes;        // of a shard, at most
    size_t in_flight;                   // pieces, at most SHARDS_IN_FLIGHT
};

size_t shards_pieces(const struct hierarchy *h, const struct shards_cut *cut);
// Bytes of the longest shard.
size_t shards_longest(const struct hierarchy *h, const struct shards_cut *cut);
// Writes the schedule of this rank, among its shard's owners. write: called for each shard of this rank that is not empty.
void schedule_shards(struct schedule *schedule, const struct hierarchy *h, const struct shards_cut *cut, write_shard_fn write,
                     void *arg);

// Begins a plan in this group, which has a hierarchy, and takes ownership of the list. Returns operands of `size` bytes, zeros except
// the struct shards. NULL: no memory; the executor has failed.
void *shards_plan(struct executor *exec, const struct group *group, const struct reduction *within, struct span_list *list, size_t size,
                  struct plan *plan);
