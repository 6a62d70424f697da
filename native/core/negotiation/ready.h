// Operations that all members have asked for: those that cannot be done are refused, the others fused, and answered.
#pragma once

#include "core/negotiation/coordinator_state.h"

// Of the coordinator's pending ones, from now on ready.
void ready_put(struct coordinator *c, struct pending *pending);
// Answers all that are ready. In time linear in their number.
bhvd_status ready_respond(bhvd_context *ctx);
void ready_fini(struct coordinator *c);
