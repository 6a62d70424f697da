// The coordinator: rank 0's second role in negotiation. It collects requests until all members of the
// process set have sent theirs, checks that they agree, decides which are fused, and responds. Empty on other ranks. Engine only.
//
//     coordinator.c    takes requests, joins and goodbyes
//     fuse.c           fuses complete operations and responds
//     refuse.c         responds with an error to those that cannot be done
//     pending.c        an operation that waits for members; checks that they agree
//     response.c       writes and sends responses
//
// The path of a request, to rank 0 and back (relays forward it):
//
//     member_request -> relay_send_requests -> relay_on_up -> coordinator_on_requests -> fuse_enqueue (all members have sent it)
//     engine_poll -> coordinator_respond -> fuse_respond -> relay_on_down -> member_on_response
//
// A known request is only an id in the first line, and a known response only ids in the second: ranks still wait for the response.
#pragma once

#include "core/negotiation/coordinator_state.h"

bhvd_status coordinator_init(bhvd_context *ctx);
void coordinator_fini(bhvd_context *ctx);

// Takes requests that each of these ranks (ascending) sent. The error names the rank.
bhvd_status coordinator_on_requests(bhvd_context *ctx, const int *ranks, int count, struct bytes_reader items);
// Ends operations that can no longer complete without this rank.
void coordinator_on_goodbye(bhvd_context *ctx, int rank);
// Has a member left? The error names the first: others may have left because of it. Always false on other ranks.
bool coordinator_any_departed(const bhvd_context *ctx, const struct process_set *set, struct bhvd_error *error);
// Responds to complete operations.
bhvd_status coordinator_respond(bhvd_context *ctx);

// Called after an execution has added or removed a process set: handles deferred requests; ends operations that wait
// for a removed set. Does nothing on other ranks.
bhvd_status coordinator_set_added(bhvd_context *ctx);
bhvd_status coordinator_set_removed(bhvd_context *ctx, struct process_set *set);
