// The engine: moves what can be moved, and executes what is agreed on. Whoever calls this holds ctx->engine_lock
// (progress.h).
#pragma once

#include "core/context/context.h"
#include "core/negotiation/relay.h"

// One look at everything that can move, and every so often at the clock. True when something did. Never blocks, executes nothing.
bool engine_poll(bhvd_context *ctx, bool look_at_sockets);
// Would an engine that sleeps miss what moves: something that no descriptor tells of?
bool engine_needs_poll(bhvd_context *ctx);
// At the clock: whose heartbeat is due or missing, what NCCL says, which operations wait too long.
void engine_check_timers(bhvd_context *ctx);

// What a context's run asks of it.
extern const struct executor_callbacks engine_callbacks;
// What the tree brings: requests to the coordinator, responses to members.
extern const struct relay_receivers engine_receivers;

// Is there an execution that may start now: those that must be over before it are?
bool engine_has_next(const bhvd_context *ctx);
// Starts it, and executes it to its end unless it can go on beside others.
void engine_execute_next(bhvd_context *ctx);
// Has any been agreed on, or started, that is not over?
bool engine_is_busy(const bhvd_context *ctx);
