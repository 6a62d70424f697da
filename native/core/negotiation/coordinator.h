// The coordinator: rank 0's second role in negotiation. It collects requests until all members of the
// process set have asked, checks that they agree, decides what is fused, and answers. Empty on other ranks. Engine only.
//
//     coordinator.c    takes requests, joins and goodbyes
//     ready.c          answers what became complete
//     pending.c        an operation that waits for members; do they agree?
//     response.c       answers as they are written and sent
#pragma once

#include "core/negotiation/coordinator_state.h"

bhvd_status coordinator_init(bhvd_context *ctx);
void coordinator_fini(bhvd_context *ctx);

// Requests that each of these ranks (rising) announced. The error names the rank.
bhvd_status coordinator_take_bundled(bhvd_context *ctx, const int *ranks, int count, struct bytes_reader items);
// Ends what can no longer complete without this rank.
void coordinator_take_goodbye(bhvd_context *ctx, int rank);
// Answers what became complete.
bhvd_status coordinator_respond(bhvd_context *ctx);

// After a process set was added or removed by an execution: takes the requests that came too early; ends those that wait
// for a set that is gone. Nothing on other ranks.
bhvd_status coordinator_set_added(bhvd_context *ctx);
bhvd_status coordinator_set_removed(bhvd_context *ctx, struct process_set *set);
