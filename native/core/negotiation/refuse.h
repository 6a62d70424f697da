// Operations that cannot be done: their members get an error as response.
#pragma once

#include "core/negotiation/coordinator_state.h"

// Refuses a ready operation with this error.
bhvd_status refuse_operation(bhvd_context *ctx, const struct process_set *set, struct pending *pending,
                             const struct bhvd_error *error);

// Refuses a pending operation that members have revoked (pairwise.h), before the others request it.
bhvd_status refuse_revoked(bhvd_context *ctx, const struct process_set *set, struct pending *pending);
// Each of the others requests it once, when it revokes it too; a later request is not a revoked one. True: this was that
// request, and it was refused like those before.
bool refuse_late_request(bhvd_context *ctx, const struct process_set *set, int rank, struct request *request, bhvd_status *status);
// Expects no more of these requests: for this name, in this set.
void refuse_forget(struct coordinator *c, const struct operation_key *key);
void refuse_forget_set(struct coordinator *c, uint32_t process_set);

void refuse_fini(struct coordinator *c);
