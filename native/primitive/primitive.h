// BAGUA's primitives over a process set. C: centralized, D: decentralized, FP / LP: full / low precision, S: synchronous.
// C_FP_S is the allreduce of collective/. Source: Gan et al., BAGUA, arXiv:2107.01499.
//
// Hierarchical, they work between hosts: each host first reduces its members' values in full precision, as an allreduce
// does, and its members end alike. What takes part then is hosts, in the order of their first members.
//     C_LP_S          encodes between hosts only. One host: as flat, encoded between all ranks.
//     D_FP_S, D_LP_S  the peers are hosts, and a host's value is the mean of its members'. One host: it has no peer.
#pragma once

#include "collective/collective.h"
#include "run/plan.h"
#include "run/work.h"

// The operation's tensors as one vector, with results allocated where the caller gave no memory. list: empty, to be
// ended by span_list_fini on errors too.
bhvd_status primitive_spans(struct run *run, struct work *work, struct span_list *list);

// Does such an operation go in two levels in this group? It does where a host holds several members, who share memory (two ranks
// over transport tcp are two hosts); C_LP_S only if there are several hosts, too.
bool primitive_is_hierarchical(const struct group *group, bhvd_kind kind, bool hierarchical);
// Participants of a decentralized primitive that goes in two levels where it can: hosts, and ranks without shared memory.
int primitive_hosts(const struct group *group);
// BHVD_ERR_UNSUPPORTED when several members on a host have no area (transport/host_memory.h), else BHVD_OK. All members
// come to the same answer.
bhvd_status primitive_check_hosts(const struct run *run, const struct group *group, struct bhvd_error *error);

// What a primitive has of its own while its plan is executed: `size` bytes, which the plan frees, as it does the list, which it takes.
// NULL: no memory; the run has failed.
void *primitive_create(struct run *run, size_t size, struct span_list *list, struct plan *plan);

// Between hosts, in two levels: by the function, of few shards at once.
struct between primitive_between(between_fn plan, const struct work *work);
// A list of a shard's own, which outlives what the function is given: that is the next piece's by then. list: empty; as of
// primitive_spans.
bhvd_status primitive_shard(struct run *run, const struct span_list *shard, struct span_list *list);

// Codes that something else has made, and decodes: the rank's own, and room for those of which the result is made. Code k of segment
// s is at k each + s segment. k: of own ones the chunk, where there are several; of results the chunk (C_LP_S by owners), the rank
// (C_LP_S of all) or the place among the peers (D_LP_S).
struct ready_codes {
    unsigned char *own, *results;
    size_t each, segment;
};

// What can go on beside other executions is only planned (`made`), and everything else done.
bhvd_status c_lp_s(struct run *run, struct group *group, struct work *work, const struct ready_codes *ready, struct plan *plan);
bhvd_status d_fp_s(struct run *run, struct group *group, struct work *work, struct plan *plan, struct bhvd_error *error);
bhvd_status d_lp_s(struct run *run, struct group *group, struct work *work, const struct ready_codes *ready, struct plan *plan,
                   struct bhvd_error *error);
