#include "core/health/health.h"

#include <stdlib.h>

#include "base/clock.h"
#include "base/status.h"
#include "core/context/context.h"
#include "core/message/frame.h"
#include "executor/task.h"

enum {
    INTERVAL_MAX_MS = 1000,
    INTERVALS = 8,                      // at least this many heartbeats within each limit
    LATE_INTERVALS = 3                  // a heartbeat waits in a ring for its reader, is counted at the reader's next poll,
                                        // and the silence is noticed at a later one: the limit counts from the fault itself
};

// A rank checks its limits as often as it sends heartbeats. Short limits need short intervals: from half a limit on, the time
// between two checks counts as a stop of this rank (stopped_ns), after which its limits begin anew.
static int interval_of(const struct bhvd_context_options *options)
{
    const int limits_ms[] = {options->heartbeat_timeout_ms, options->timeout_ms};
    int interval_ms = INTERVAL_MAX_MS;
    for (int i = 0; i < 2; i++)
        if (limits_ms[i] > 0 && limits_ms[i] / INTERVALS < interval_ms)
            interval_ms = limits_ms[i] / INTERVALS + 1;
    return interval_ms;
}

bhvd_status heartbeat_init(bhvd_context *ctx)
{
    struct heartbeat *h = ctx->heartbeat = calloc(1, sizeof *h + (size_t)ctx->options.size * sizeof h->ranks[0]);
    if (!h)
        return BHVD_ERR_SYSTEM;
    int timeout_ms = ctx->options.heartbeat_timeout_ms;
    h->interval_ms = interval_of(&ctx->options);
    int silence_ms = timeout_ms - LATE_INTERVALS * h->interval_ms;
    h->silence_ns = timeout_ms > 0 ? clock_ms_ns(silence_ms > 1 ? silence_ms : 1) : 0;
    int64_t limit_ns = clock_ms_ns(ctx->options.timeout_ms);
    h->stopped_ns = (h->silence_ns && h->silence_ns < limit_ns ? h->silence_ns : limit_ns) / 2;
    ctx->exec.sleep_ms = h->interval_ms;
    h->checked_ns = clock_now_ns();
    for (int rank = 0; rank < ctx->options.size; rank++)
        h->ranks[rank].at_ns = h->checked_ns;
    return BHVD_OK;
}

// The oldest execution in progress; 0: none.
static uint64_t oldest_started(const bhvd_context *ctx)
{
    const uint64_t oldest = tasks_oldest_execution(&ctx->exec);
    return oldest ? oldest : ctx->executing;
}

static bool monitors(const bhvd_context *ctx, int rank)
{
    return rank != ctx->options.rank && (rank == COORDINATOR || ctx->options.rank == COORDINATOR) &&
           ctx->exec.connections.links[rank].state == LINK_OPEN;
}

static uint64_t earliest_execution(const bhvd_context *ctx)
{
    uint64_t earliest = oldest_started(ctx);
    if (!earliest && ctx->executions.head)
        earliest = ctx->executions.head->number;
    for (int rank = 0; rank < ctx->options.size && ctx->options.rank == COORDINATOR; rank++) {
        uint64_t execution = ctx->heartbeat->ranks[rank].execution;
        if (monitors(ctx, rank) && execution && (!earliest || execution < earliest))
            earliest = execution;
    }
    return earliest;
}

static void check_silence(bhvd_context *ctx, int rank, int64_t now_ns, bool was_stopped)
{
    const struct link *link = &ctx->exec.connections.links[rank];
    struct peer_state *peer = &ctx->heartbeat->ranks[rank];
    uint64_t received = link->payload_received + link->frames_received;
    if (received != peer->received || was_stopped) {
        peer->received = received;
        peer->at_ns = now_ns;
    } else if (ctx->heartbeat->silence_ns && now_ns - peer->at_ns >= ctx->heartbeat->silence_ns) {
        executor_blame(&ctx->exec, BHVD_ERR_PEER_LOST, BHVD_CAUSE_SILENT, rank,
                       "rank %d was lost: nothing came from it for %.1f s. Its process may be stopped, or its host or the "
                       "network down. The limit, %g s, is set by BAGUA_HVD_HEARTBEAT_TIMEOUT_SECONDS", rank,
                       (double)(now_ns - peer->at_ns) / 1e9, ctx->options.heartbeat_timeout_ms / 1000.0);
    }
}

// Covers both messages of operations and frames of the negotiation.
static void expect_acknowledgement(bhvd_context *ctx, int rank, int64_t now_ns)
{
    struct heartbeat *h = ctx->heartbeat;
    struct link *link = &ctx->exec.connections.links[rank];
    struct peer_state *peer = &h->ranks[rank];
    uint64_t sent = link->payload_sent + link->sends.done + link->control_sent;
    if (!h->silence_ns || sent == peer->acknowledged)
        return;
    int64_t silence_ns = link_silence_ns(link, now_ns);
    if (silence_ns < 0) {
        peer->acknowledged = sent;
    } else if (silence_ns >= h->silence_ns && now_ns - ctx->exec.returned_ns >= h->silence_ns) {
        executor_blame(&ctx->exec, BHVD_ERR_PEER_LOST, BHVD_CAUSE_SILENT, rank,
                       "rank %d was lost: its host acknowledged nothing for %.1f s of what rank %d sent to it. Its host or the "
                       "network may be down. The limit, %g s, is set by BAGUA_HVD_HEARTBEAT_TIMEOUT_SECONDS", rank,
                       (double)silence_ns / 1e9, ctx->options.rank, ctx->options.heartbeat_timeout_ms / 1000.0);
    }
}

void heartbeat_check(bhvd_context *ctx)
{
    struct heartbeat *h = ctx->heartbeat;
    if (ctx->options.size == 1 || ctx->exec.failure.status)
        return;
    int64_t now_ns = clock_now_ns();
    bool was_stopped = now_ns - h->checked_ns >= h->stopped_ns;
    h->checked_ns = now_ns;
    if (was_stopped)
        ctx->exec.returned_ns = now_ns;
    if (now_ns < h->next_ns && !was_stopped)
        return;
    h->next_ns = now_ns + clock_ms_ns(h->interval_ms);
    struct bytes payload = {0};
    bytes_put_i64(&payload, (int64_t)earliest_execution(ctx));
    for (int rank = 0; rank < ctx->options.size && !ctx->exec.failure.status; rank++) {
        struct link *link = &ctx->exec.connections.links[rank];
        if (monitors(ctx, rank)) {
            // Unwritten frames show as much; and an unread queue must not grow. A broken connection is noticed
            // when it is read, after a goodbye that may explain it.
            if (link->control_out.size == 0)
                link_send_frame(link, FRAME_HEARTBEAT, &payload, true);
            check_silence(ctx, rank, now_ns, was_stopped);
        }
        if (rank != ctx->options.rank && link->state == LINK_OPEN && !ctx->exec.failure.status)
            expect_acknowledgement(ctx, rank, now_ns);
    }
    bytes_fini(&payload);
}

bhvd_status heartbeat_on_frame(bhvd_context *ctx, struct link *link, struct bytes_reader payload)
{
    uint64_t execution = (uint64_t)bytes_take_i64(&payload);
    if (payload.failed || (link->rank != COORDINATOR && ctx->options.rank != COORDINATOR))
        return BHVD_ERR_PROTOCOL;
    ctx->heartbeat->ranks[link->rank].execution = execution;
    return BHVD_OK;
}

bool heartbeat_others_are_earlier(const bhvd_context *ctx)
{
    uint64_t earliest = 0;
    if (!ctx->heartbeat->silence_ns)
        return false;                   // nobody would notice that the rank with the earlier execution was stopped
    if (ctx->options.rank == COORDINATOR)
        earliest = earliest_execution(ctx);
    else if (monitors(ctx, COORDINATOR))
        earliest = ctx->heartbeat->ranks[COORDINATOR].execution;
    return earliest && earliest < oldest_started(ctx);
}
