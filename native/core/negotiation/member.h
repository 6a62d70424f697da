// Negotiation: ranks match operations by name, in whatever order they post them. Event-driven:
//
//     member       posts -> request (in full, or just the id of a cached agreement) -> coordinator (rank 0)
//     coordinator  when the last member has requested it: checks that all requests agree, decides which operations are fused
//                  -> RESPONSE to every member
//     member       appends the responses, in the order of arrival, to its list of executions
//
// One coordinator for all process sets makes one global order of responses, and every rank starts its executions in that order.
// Over links several run concurrently and end in any order, within a window: a response says which executions must
// be over before it starts, the same for all ranks. So all members of the earliest unfinished execution are free for it, and a
// message for a later one that has not started here comes from a rank that has finished the earliest (transport/link.h):
// this excludes deadlock.
//
// Numbers that a response adds to the request: allgather: dim 0 of each tensor on each rank, [tensor][set rank];
// alltoall: for each tensor the rows that this member receives from each, [set rank], and the largest number of rows that any
// member sends to any, so each member gets its own response of n numbers instead of n^2; join: the rank that joined last;
// others: nothing.
#pragma once

#include "core/context/context.h"
#include "core/context/operation.h"

// Requests operations that this rank posted (a list linked by `next`).
bhvd_status member_request(bhvd_context *ctx, struct bhvd_operation *posted);
// Frames of the coordinator, which may be this rank: a response; a CACHE_MISS, which asks for the full request of an unknown id.
bhvd_status member_on_response(bhvd_context *ctx, struct bytes_reader payload);
bhvd_status member_on_cache_miss(bhvd_context *ctx, struct bytes_reader payload);

// Does a response fit this rank's request? A rank accepts nothing that would make it read or write
// out of bounds, not even from a peer that knows the secret, which may be broken or of another version.
// Checks op's response_numbers.
bool response_agrees(const struct process_set *set, const struct bhvd_operation *op);
// May the operation be fused with those that `execution` already has?
bool response_continues(const struct execution *execution, const struct bhvd_operation *op);
