// What the engine does with process sets: executions that add or remove one, beside which nothing else executes; and NCCL's
// communicators, which a set creates for its first execution on GPUs. Engine only.
#pragma once

#include "core/context/context.h"

// op's value becomes the set's id. error: the reason, if this rank alone cannot add it.
bhvd_status execute_process_set_add(bhvd_context *ctx, struct bhvd_operation *op, struct bhvd_error *error);
// op's value becomes 1, or 0 if there is no such set. First waits for the set's executions and pairwise operations.
bhvd_status execute_process_set_remove(bhvd_context *ctx, struct bhvd_operation *op);

// Fails the context if NCCL reports an error.
void communicators_check(bhvd_context *ctx);
// Aborts all work on the GPU at once.
void communicators_abort(bhvd_context *ctx);
// Agrees on a communicator with the other members, unless the set has one.
bhvd_status communicators_agree(bhvd_context *ctx, struct process_set *set, const struct collective *coll);
// Waits until the GPU has done all enqueued work; operations end before that. Fails the executor if it takes too long.
void communicators_await(bhvd_context *ctx);
// Closes those of one set, or of all: waits a moment for work on the GPU.
void communicators_close(bhvd_context *ctx, struct process_set *set);
void communicators_close_all(bhvd_context *ctx);
