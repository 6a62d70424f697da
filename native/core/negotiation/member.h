// Negotiation: ranks match operations by name, whatever the order they post them in. Event-driven:
//
//     member       posts -> request (in full, or just the id of a cached agreement) -> coordinator (rank 0)
//     coordinator  when the last member has asked: checks that all ask for the same, decides what is fused
//                  -> RESPONSE to every member
//     member       puts the responses, in the order they come, into its list of executions
//
// There is one coordinator for all process sets, so there is one global order of responses, and every rank starts its part of it
// in that order. Over links several go on at once and end in any order, within a window: a response says which executions must
// be over before it starts, the same for all. So the earliest unfinished execution has all its members free for it, and what
// comes for a later one that has not started here comes from a rank that has finished the earliest (transport/link.h): hence
// no deadlock.
//
// What a response adds to the request ("agreed"): allgather: dim 0 of each tensor on each rank, [tensor][set rank];
// alltoall: of each tensor the rows that this member receives from each, [set rank], and the largest number of rows that any
// member sends to any: so a response of its own to each member, of n numbers, not n^2 to all; join: the rank that joined last; others:
// nothing.
#pragma once

#include "core/context/operation.h"

// Announces operations that this rank posted (a list linked by `next`).
bhvd_status member_request(bhvd_context *ctx, struct bhvd_handle *posted);
// The coordinator's frames, also when it is this rank itself: a response; "I do not know this id, say it in full".
bhvd_status member_take_response(bhvd_context *ctx, struct bytes_reader payload);
bhvd_status member_take_stale(bhvd_context *ctx, struct bytes_reader payload);
