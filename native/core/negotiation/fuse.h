// Operations that all members have requested: those that cannot be done are refused, the others are fused and get responses.
#pragma once

#include "core/negotiation/coordinator_state.h"

// Moves a pending operation to the ready ones.
void fuse_enqueue(struct coordinator *c, struct pending *pending);
// Responds to all ready operations, in time linear in their number.
bhvd_status fuse_respond(bhvd_context *ctx);
void fuse_fini(struct coordinator *c);
