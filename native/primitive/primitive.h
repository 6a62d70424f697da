// BAGUA's primitives over a process set. C: centralized, D: decentralized, FP / LP: full / low precision, S: synchronous.
// C_FP_S is the allreduce of collective/. Source: Gan et al., BAGUA, arXiv:2107.01499.
//
// Hierarchical primitives work between hosts: each host first reduces its members' values in full precision, as an allreduce does,
// and its members end with equal results. The participants are then hosts, in the order of their first members.
//     C_LP_S          encodes between hosts only. One host: as flat, encoded between all ranks.
//     D_FP_S, D_LP_S  the peers are hosts, and a host's value is the mean of its members'. One host: it has no peer.
#pragma once

#include "collective/collectives.h"
#include "collective/shards.h"
#include "executor/collective.h"
#include "executor/task.h"
#include "primitive/peers.h"

// Whether such an operation is hierarchical in this group. It is if some host holds several members with shared memory (two
// ranks over transport tcp are two hosts); for C_LP_S there must also be several hosts.
bool primitive_is_hierarchical(const struct group *group, bhvd_kind kind, bool hierarchical);
// Number of participants of a decentralized primitive that is hierarchical where possible: hosts, and ranks without shared memory.
int primitive_hosts(const struct group *group);

// Participant i's peers among n.
static inline struct peers primitive_peers(const struct collective *coll, int n, int i)
{
    return peers_of(coll->args.kind == BHVD_D_LP_S ? BHVD_TOPOLOGY_RING : coll->args.topology, n, i, coll->args.round);
}

// Allocates `size` bytes for the primitive's state while its plan is executed, for its custom steps. Takes ownership of the list;
// the plan frees both. NULL: out of memory; the executor has failed.
void *primitive_create(struct executor *exec, size_t size, const struct collective *coll, run_custom_step_fn run_custom_step,
                       struct span_list *list, struct plan *plan);

// A primitive between hosts works on shards of the vector (collective/shards.h): large ones, since each is sent in segments.
enum { PRIMITIVE_SHARD_BYTES = 16 << 20, PRIMITIVE_SHARDS_IN_FLIGHT = 2 };

// Codes that the caller has made and will decode: the rank's own, and a buffer for those that form the result. Code k of segment s
// is at offset k each + s segment. In `own`, k is the chunk if there are several. In `results`, k is the chunk (C_LP_S by owners),
// the rank (C_LP_S of all) or the index of the peer (D_LP_S).
struct gpu_codes {
    unsigned char *own, *results;
    size_t each, segment;
};

// Plans or executes an operation on its vector, which is not empty. It may take ownership of the list, the tensors as one vector;
// it is empty if a GPU encodes them for C_LP_S.
typedef bhvd_status primitive_fn(struct executor *exec, struct group *group, const struct collective *coll,
                                 const struct gpu_codes *gpu, struct span_list *list, struct plan *plan);

struct primitive {
    primitive_fn *among, *hosts;        // among all members, or among hosts
};

extern const struct primitive c_lp_s, d_fp_s, d_lp_s;

// An operation that can run beside other executions is only planned; any other is executed. Also allocates results for which the
// caller gave no memory; D_LP_S may have none. BHVD_ERR_UNSUPPORTED, on all members: a decentralized operation between hosts, some
// of which hold several members without a shared-memory area (transport/shm_segment.h).
bhvd_status primitive_execute(struct executor *exec, struct group *group, struct collective *coll, const struct gpu_codes *gpu,
                              struct plan *plan, struct bhvd_error *error);
