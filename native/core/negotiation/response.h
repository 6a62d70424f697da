// Writes and sends the coordinator's responses: one operation, or several fused ones, to all members; an error
// to all or to one. Members read them in member.c.
#pragma once

#include "core/negotiation/coordinator_state.h"

// Begins a response for `count` operations of `nbytes` in total, in c->out. alone: no other execution may be concurrent.
void response_begin(struct coordinator *c, uint32_t process_set, uint32_t count, size_t nbytes, bool alone);
// Writes the header of an operation named in full; id: of its new cached agreement, 0: none.
void response_put_header(struct bytes *out, const struct operation_key *key, uint32_t id, bhvd_status status);
// Sends c->out to all members, this rank last, where it becomes an execution.
bhvd_status response_send(bhvd_context *ctx, const struct process_set *set);
// The same to one member, for responses that differ per member.
bhvd_status response_send_to(bhvd_context *ctx, int rank);

// Ends an operation with an error, on all members that have requested it / on one rank.
bhvd_status response_refuse_all(bhvd_context *ctx, const struct process_set *set, const struct pending *pending,
                                const struct bhvd_error *error);
bhvd_status response_refuse(bhvd_context *ctx, int rank, const struct operation_key *key, const struct bhvd_error *error);

// Asks for the full request of an unknown id. BHVD_ERR_PROTOCOL: the rank has left too many such questions without a reply.
bhvd_status response_send_cache_miss(bhvd_context *ctx, int rank, uint32_t id);
