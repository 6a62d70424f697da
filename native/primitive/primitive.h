// BAGUA's primitives over a process set. C: centralized, D: decentralized, FP / LP: full / low precision, S: synchronous.
// C_FP_S is the allreduce of collective/. Source: Gan et al., BAGUA, arXiv:2107.01499.
#ifndef BHVD_PRIMITIVE_H
#define BHVD_PRIMITIVE_H

#include "collective/collective.h"

// The operation's tensors as one vector, with results allocated where the caller gave no memory. list: empty, to be
// ended by span_list_fini on errors too.
bhvd_status primitive_spans(bhvd_context *ctx, struct bhvd_handle *op, struct span_list *list);

bhvd_status c_lp_s(bhvd_context *ctx, struct process_set *set, struct bhvd_handle *op);
bhvd_status d_fp_s(bhvd_context *ctx, struct process_set *set, struct bhvd_handle *op);
bhvd_status d_lp_s(bhvd_context *ctx, struct process_set *set, struct bhvd_handle *op);

#endif
