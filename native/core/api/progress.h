// The engine makes operations progress. One thread at a time holds ctx->engine_lock and runs it: the progress thread, or,
// when that sleeps, a thread that waits for its operation (so a blocking call needs no switch between threads). A waiting thread
// that finds the lock taken sleeps until its own operation has ended: the progress thread takes over from the thread that has it.
#pragma once

#include "core/context/context.h"

// Starts the progress thread.
bhvd_status progress_start(bhvd_context *ctx, struct bhvd_error *error);
// Stops it: says goodbye to all peers, ends operations in progress.
void progress_stop(bhvd_context *ctx);

// Waits for the end of the operation, and makes progress on this thread if no other thread does.
void progress_wait(struct bhvd_operation *op, int64_t deadline_ns);
