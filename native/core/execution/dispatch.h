// Control frames of peers, to whom they concern.
#pragma once

#include "core/negotiation/relay.h"

bhvd_status dispatch_frame(bhvd_context *ctx, struct link *link, uint8_t type, struct bytes_reader payload);
// What the tree brings: requests to the coordinator, responses to members.
extern const struct relay_receivers dispatch_receivers;
