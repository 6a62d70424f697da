// The coordinator's answers, written and sent: an operation, or several to be executed as one, to all members; an error
// to all or to one. Members read them in member.c.
#pragma once

#include "core/negotiation/coordinator_state.h"

// Begins a response about `count` operations of so many bytes together, in c->out. alone: beside no other execution.
void response_begin(struct coordinator *c, uint32_t process_set, uint32_t count, size_t nbytes, bool alone);
// The head of an operation that is named in full; id: of its new agreement in the cache, 0: none.
void response_put_head(struct bytes *out, const struct operation_key *key, uint32_t id, bhvd_status status);
// Sends c->out to all members, to this rank last: its part becomes an execution.
bhvd_status response_send(bhvd_context *ctx, const struct process_set *set);
// The same to one member, of a response that says something else to each.
bhvd_status response_send_to(bhvd_context *ctx, int rank);

// Ends an operation with an error, on all members that have asked / on one rank.
bhvd_status response_refuse_all(bhvd_context *ctx, const struct process_set *set, const struct pending *pending,
                                const struct bhvd_error *error);
bhvd_status response_refuse(bhvd_context *ctx, int rank, const struct operation_key *key, const struct bhvd_error *error);

// "I do not know this id, say it in full."
bhvd_status response_send_stale(bhvd_context *ctx, int rank, uint32_t id);
