// Operations that all members have asked for: those that cannot be done are refused, the others fused, and answered.
#pragma once

#include "core/negotiation/coordinator_state.h"

// Of the coordinator's pending ones, from now on ready.
void ready_put(struct coordinator *c, struct pending *pending);
// Answers all that are ready. In time linear in their number.
bhvd_status ready_respond(bhvd_context *ctx);

// Refuses one of the pending ones, which members have revoked (pairwise.h), before the others ask for it.
bhvd_status ready_refuse(bhvd_context *ctx, const struct process_set *set, struct pending *pending);
// Each of those asks for it once, when it revokes it too: a request of a later turn is not a revoked one. True: this is that
// request, and it was refused as those before.
bool ready_refuses(bhvd_context *ctx, const struct process_set *set, int rank, struct request *request, bhvd_status *status);
void ready_forget_set(struct coordinator *c, uint32_t process_set);

void ready_fini(struct coordinator *c);
