// What a member tells the coordinator: requests, through the tree.
#pragma once

#include "core/context/operation.h"
#include "core/message/frame.h"

// Appends the operation's whole request.
void announce_put_full(bhvd_context *ctx, struct bytes *out, enum item_tag tag, const struct bhvd_handle *op);
bhvd_status announce(bhvd_context *ctx, const struct bytes *items);
// Announces one in full, as one that has revoked it from its neighbors.
bhvd_status announce_revoked(bhvd_context *ctx, struct bhvd_handle *op);
