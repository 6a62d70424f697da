// Hierarchical reduction of a vector in shards, for hosts with several members each:
//
//     reduce-scatter within each host, in shared memory:   local member s holds the host's sum of shard s
//     work on shard s among its owners, over links:        every owner drives its own sockets
//     allgather within each host, in shared memory
//
// A vector is cut into pieces, so that shards of some are on the wire while others are reduced or distributed.
#pragma once

#include "collective/collectives.h"

enum { SHARDS_IN_FLIGHT = 4 };

struct shards;

// What the owners of shards do. mine: the shard, a range of the vector.
struct shards_work {
    size_t shard_nbytes, in_flight;     // at most, as in struct shards
    // Writes their steps, as a part of the schedule (executor/schedule.h) in which the shard is the vector and the input.
    void (*write)(const struct shards *x, struct schedule *schedule, struct byte_range mine);
    // Runs a custom step on the shard. NULL: there are none.
    void (*run_custom_step)(const struct shards *x, struct byte_range mine, const struct span_list *shard, const struct step *step,
                            unsigned char *const *buffers);
};

// The operands of the schedule.
struct shards {
    const struct hierarchy *h;
    const struct shards_work *work;
    size_t nbytes, shard_nbytes;        // of the vector; of a shard, at most
    size_t in_flight;                   // pieces, at most SHARDS_IN_FLIGHT
    size_t *scratch;                    // by piece in flight: where the owners' scratch memory begins
    struct executor *exec;
    const struct collective *coll;
    struct network_cost network;
    struct reduction reduction;
    const struct span_list *list;
    struct span_list piece;             // the spans of the piece being reduced or distributed
    size_t *part;                       // and, by local member, bytes of its shard
    union {
        struct reducescatter_pipeline reducing;
        struct exchange_pipeline distributing;
    };
};

// Writes the schedule of this rank, among its shard's owners. Needs only the first members of x, up to scratch.
void schedule_shards(struct schedule *schedule, const struct shards *x);

// Plans the work on the list, which is not empty, in this group, which has a hierarchy. Takes ownership of the list. coll: for the
// work; NULL if it needs none. reduction: within hosts.
bhvd_status shards_plan(struct executor *exec, const struct group *group, const struct collective *coll,
                        const struct reduction *reduction, const struct shards_work *work, struct span_list *list,
                        struct plan *plan);
