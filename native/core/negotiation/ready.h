// Operations that all members have requested: those that cannot be done are refused, the others are fused and get responses.
#pragma once

#include "core/negotiation/coordinator_state.h"

// Moves a pending operation to the ready ones.
void ready_put(struct coordinator *c, struct pending *pending);
// Responds to all ready operations, in time linear in their number.
bhvd_status ready_respond(bhvd_context *ctx);

// Refuses a pending operation that members have revoked (pairwise.h), before the others request it.
bhvd_status ready_refuse(bhvd_context *ctx, const struct process_set *set, struct pending *pending);
// Each of the others requests it once, when it revokes it too; a later request is not a revoked one. True: this was that
// request, and it was refused like those before.
bool ready_refuses(bhvd_context *ctx, const struct process_set *set, int rank, struct request *request, bhvd_status *status);
void ready_forget_set(struct coordinator *c, uint32_t process_set);

void ready_fini(struct coordinator *c);
