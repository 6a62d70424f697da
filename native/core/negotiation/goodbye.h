// How a rank leaves: its goodbye, and those that end its own part as well. Engine only.
#ifndef BHVD_GOODBYE_H
#define BHVD_GOODBYE_H

#include "bagua_hvd.h"
#include "base/bytes.h"

// To all peers, once: this rank takes part in nothing any more. When it failed, it says why, and when the coordinator is not the
// first to leave, who was, so that all ranks name the same cause.
void goodbye_say(bhvd_context *ctx);
// One that ends this rank's part: the coordinator's, or one that tells of a failure.
bhvd_status goodbye_take_end(bhvd_context *ctx, struct bytes_reader reason);

#endif
