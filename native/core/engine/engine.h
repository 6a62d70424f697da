// The engine makes progress: it polls links, negotiates, and starts agreed executions, which the executor runs
// (executor/executor.h). The caller of these functions holds ctx->engine_lock (api/progress.c).
#pragma once

#include "core/context/context.h"
#include "core/negotiation/relay.h"

// Polls everything once, and regularly checks timers. True if something moved. Never blocks, executes nothing.
bool engine_poll(bhvd_context *ctx, bool poll_sockets);
// Is there work that no descriptor reports, and that a sleeping engine would miss?
bool engine_needs_poll(bhvd_context *ctx);
// Checks all timers: heartbeats, NCCL errors, operations that wait too long.
void engine_check_timers(bhvd_context *ctx);

// The executor's callbacks.
extern const struct executor_callbacks engine_callbacks;
// Receivers of relayed frames: requests for the coordinator, responses for members.
extern const struct relay_receivers engine_receivers;

// Is there an execution that may start now, because the ones that must end before it are over?
bool engine_has_next(const bhvd_context *ctx);
// Starts it, and runs it to completion unless it can run concurrently.
void engine_execute_next(bhvd_context *ctx);
// Is any agreed or started execution not over?
bool engine_is_busy(const bhvd_context *ctx);

// execute.c. Chooses the algorithm, and fills in results and values; or, for one over links alone, only makes the execution's plan,
// which can run concurrently. error: set if it cannot be executed and the context stays usable.
bhvd_status execution_run(bhvd_context *ctx, struct execution *execution, struct bhvd_error *error);

// The same for a pairwise operation that all neighbors have posted (pairwise.h).
bhvd_status execution_run_pairwise(bhvd_context *ctx, struct bhvd_operation *op, struct plan *plan, struct bhvd_error *error);
