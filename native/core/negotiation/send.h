// Frames of the negotiation to one peer.
#pragma once

#include "bagua_hvd.h"
#include "base/bytes.h"
#include "core/message/frame.h"

// Sends a frame of the negotiation to a rank, unless that has left.
bhvd_status frame_send(bhvd_context *ctx, int rank, enum frame_type type, const struct bytes *payload, bool lazy);
