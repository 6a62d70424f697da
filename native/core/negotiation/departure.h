// How ranks leave without losing responses: a rank that is done or has failed, the coordinator, and relays. A rank stays
// until the coordinator has responded to all its requests, a relay also until its children have left. When the
// coordinator leaves, its CLOSING reaches each rank of a tree after all its responses. Engine only.
#pragma once

#include "bagua_hvd.h"
#include "base/bytes.h"

struct link;

// This rank sends no more requests: the others need not wait for it, although it may have to stay.
bhvd_status departure_begin(bhvd_context *ctx);
// True if no rank relies on this one any more, as a relay, and no response to it may be in flight.
bool departure_is_free(bhvd_context *ctx);
// Tells all peers, once, that this rank takes part in nothing any more. A failed rank adds the reason; if the coordinator is not
// the first to leave, it adds which rank was, so that all ranks report the same cause.
void departure_send_goodbye(bhvd_context *ctx);

bhvd_status departure_on_goodbye(bhvd_context *ctx, struct link *link, struct bytes_reader reason);
bhvd_status departure_on_closing(bhvd_context *ctx, struct link *link, struct bytes_reader reason);
// If the parent is silent after the coordinator left, stops waiting for it.
void departure_check_timer(bhvd_context *ctx, int64_t now_ns);
