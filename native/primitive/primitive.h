// BAGUA's primitives over a process set. C: centralized, D: decentralized, FP / LP: full / low precision, S: synchronous.
// C_FP_S is the allreduce of collective/. Source: Gan et al., BAGUA, arXiv:2107.01499.
//
// Hierarchical, they work between hosts: each host first reduces its members' values in full precision, as an allreduce
// does, and its members end alike. What takes part then is hosts, in the order of their first members.
//     C_LP_S          encodes between hosts only. One host: as flat, encoded between all ranks.
//     D_FP_S, D_LP_S  the peers are hosts, and a host's value is the mean of its members'. One host: it has no peer.
#ifndef BHVD_PRIMITIVE_H
#define BHVD_PRIMITIVE_H

#include "collective/collective.h"

// The operation's tensors as one vector, with results allocated where the caller gave no memory. list: empty, to be
// ended by span_list_fini on errors too.
bhvd_status primitive_spans(bhvd_context *ctx, struct bhvd_handle *op, struct span_list *list);

// The sum of the members of one host, scaled before and after.
struct reduction primitive_within(const bhvd_context *ctx, bhvd_dtype dtype, double prescale, double postscale);

// Does such an operation go in two levels in this set? It does where a host holds several members, who share memory (two ranks
// over transport tcp are two hosts); C_LP_S only if there are several hosts, too.
bool primitive_has_levels(const struct process_set *set, bhvd_kind kind, bool hierarchical);
// BHVD_ERR_UNSUPPORTED when several members on a host have no area (transport/host_memory.h), else BHVD_OK. All members
// come to the same answer.
bhvd_status primitive_check_hosts(const bhvd_context *ctx, const struct process_set *set, struct bhvd_error *error);

// error: filled when the operation cannot be done and the context stays usable.
bhvd_status c_lp_s(bhvd_context *ctx, struct process_set *set, struct bhvd_handle *op);
bhvd_status d_fp_s(bhvd_context *ctx, struct process_set *set, struct bhvd_handle *op, struct bhvd_error *error);
bhvd_status d_lp_s(bhvd_context *ctx, struct process_set *set, struct bhvd_handle *op, struct bhvd_error *error);

#endif
