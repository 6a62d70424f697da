// The engine: what makes operations progress. One at a time holds ctx->engine_lock and runs it: the progress thread, or,
// when that is asleep, a thread that waits for its operation (so a blocking call costs no hand-over between threads).
#pragma once

#include "core/context/context.h"

// Starts the progress thread.
bhvd_status progress_start(bhvd_context *ctx, struct bhvd_error *error);
// Ends it: says goodbye to all peers, ends what is in progress.
void progress_stop(bhvd_context *ctx);

// Waits for the end of the operation, making progress on this thread when nobody else does.
void progress_wait(struct bhvd_handle *op, int64_t deadline_ns);
