// NCCL's communicators of all process sets: a set agrees on one in its first execution on GPUs. Engine only.
#pragma once

#include "core/context/context.h"

// Fails the context where NCCL reports an error.
void communicators_look(bhvd_context *ctx);
// Ends what is on the GPU, at once.
void communicators_abort(bhvd_context *ctx);
// The set agrees, unless it has.
bhvd_status communicators_agree(bhvd_context *ctx, struct process_set *set, const struct work *work);
// The set ends, or all do: waits a moment for what is on the GPU.
// Waits until the GPU has done what it was given; operations end before. The run fails when that takes too long.
void communicators_await(bhvd_context *ctx);
void communicators_close(bhvd_context *ctx, struct process_set *set);
void communicators_close_all(bhvd_context *ctx);
