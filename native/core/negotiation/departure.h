// How ranks leave without losing responses: a rank that is done or has failed, the coordinator, and relays. A rank stays
// until the coordinator has answered or refused all that it asked for, a relay also until its children have left. When the
// coordinator leaves, its CLOSING reaches each rank of a tree behind all its responses. Engine only.
#pragma once

#include "bagua_hvd.h"
#include "base/bytes.h"

struct link;

// This rank asks for nothing more: the others need not wait for it, although it may have to stay.
bhvd_status departure_begin(bhvd_context *ctx);
// True when nobody counts on this rank any more: as a relay, or for a response that may be on its way.
bool departure_is_free(bhvd_context *ctx);
// To all peers, once: this rank takes part in nothing any more. When it failed, it says why, and when the coordinator is not the
// first to leave, who was, so that all ranks name the same cause.
void departure_say_goodbye(bhvd_context *ctx);

bhvd_status departure_take_goodbye(bhvd_context *ctx, struct link *link, struct bytes_reader reason);
bhvd_status departure_take_closing(bhvd_context *ctx, struct link *link, struct bytes_reader reason);
// Waits no longer for a parent that says nothing after the coordinator left.
void departure_check_timer(bhvd_context *ctx, int64_t now_ns);
