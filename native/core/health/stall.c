// The stall check: operations that some ranks requested and others did not, for too long. Rank 0 logs which ranks are
// missing and what each requested last; it also notifies them, so that they can log where they are. The first texts are Horovod's.
#include "core/health/health.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/status.h"
#include "core/context/context.h"
#include "core/message/frame.h"
#include "core/message/rank_set.h"
#include "core/negotiation/coordinator.h"
#include "core/negotiation/departure.h"

enum { LINE_BYTES = 1024 };

struct stall {
    int64_t now_ns, warning_ns, shutdown_ns;
    bool warn, first, shut_down;        // first: an operation without an earlier warning
    struct bhvd_stalled *ranks;         // by global rank
    struct rank_set over_limit;         // an operation has waited for them longer than the shutdown time
    bool any;                           // a rank is missing somewhere
};

static void add_missing(struct stall *stall, int rank, const struct pending *pending, bool over_limit)
{
    struct bhvd_stalled *missing = &stall->ranks[rank];
    stall->any = true;
    if (over_limit)
        rank_set_add(&stall->over_limit, rank);
    missing->rank = rank;
    if (missing->operations < BHVD_STALLED_NAMES)
        snprintf(missing->names[missing->operations], sizeof missing->names[0], "%.*s", (int)pending->key.name_size,
                 pending->key.name);
    missing->operations++;
}

// False: all requests are receives that were posted ahead of a call.
static bool is_awaited(const struct pending *pending)
{
    for (int i = 0; i < pending->size; i++) {
        if (pending->requests[i] && !request_is_speculative(pending->requests[i]))
            return true;
    }
    return false;
}

static void look_at(bhvd_context *ctx, struct pending *pending, struct stall *stall)
{
    const int32_t *ranks = pending->set->group.ranks;
    int64_t waited_ns = stall->now_ns - pending->since_ns;
    if (waited_ns < stall->warning_ns || !is_awaited(pending))
        return;
    bool over_limit = stall->shutdown_ns > 0 && waited_ns >= stall->shutdown_ns;
    if (stall->now_ns - pending->warned_ns >= stall->warning_ns) {
        stall->warn = true;
        stall->first |= pending->warned_ns == pending->since_ns;
        pending->warned_ns = stall->now_ns;
    }
    stall->shut_down |= over_limit;
    const struct request *first = pending->requests[pending->first];
    for (int i = 0; i < pending->size; i++) {
        if (request_is_of_members(first) && !request_lists(first, ranks[i]))
            continue;
        if (!pending->requests[i] && !ctx->coordinator->requesters[ranks[i]].joined)
            add_missing(stall, ranks[i], pending, over_limit);
    }
}

__attribute__((format(printf, 2, 3))) static void add(struct bytes *report, const char *format, ...)
{
    char line[LINE_BYTES + 32];
    va_list args;
    va_start(args, format);
    int size = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    bytes_put(report, line, size < (int)sizeof line ? (size_t)size : sizeof line - 1);
}

static void add_names(struct bytes *text, const struct bhvd_stalled *missing)
{
    for (int i = 0; i < BHVD_STALLED_NAMES && i < missing->operations; i++)
        add(text, "%s%s", i ? ", " : "", missing->names[i]);
    if (missing->operations > BHVD_STALLED_NAMES)
        add(text, " ...");
}

static void add_seen(struct bytes *report, int rank, const struct requester *requester, int64_t now_ns)
{
    if (requester->last)
        add(report, "\nRank %d requested '%.*s' %.1f s ago, its operation number %llu, and nothing since.", rank,
            requester->last->key.name_size > 100 ? 100 : (int)requester->last->key.name_size, requester->last->key.name,
            (double)(now_ns - requester->at_ns) / 1e9, (unsigned long long)requester->operations);
    else
        add(report, "\nRank %d has requested nothing yet.", rank);
}

static void log_report(bhvd_context *ctx, const struct stall *stall)
{
    struct bytes report = {0};
    add(&report, "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are "
                 "waiting for remainder of ranks for more than %lld seconds. This may indicate that different ranks are "
                 "trying to submit different tensors or that only subset of ranks is submitting tensors, which will cause "
                 "deadlock.\nMissing ranks:", (long long)(stall->warning_ns / 1000000000));
    for (int rank = 0; rank < ctx->options.size; rank++) {
        if (!stall->ranks[rank].operations)
            continue;
        add(&report, "\n%d%s: [", rank, rank_set_has(&stall->over_limit, rank) ? "!" : "");
        add_names(&report, &stall->ranks[rank]);
        add(&report, "]");
    }
    for (int rank = 0; rank < ctx->options.size; rank++) {
        if (stall->ranks[rank].operations)
            add_seen(&report, rank, &ctx->coordinator->requesters[rank], stall->now_ns);
    }
    if (!report.failed)
        log_put(&ctx->log, BHVD_LOG_WARNING, __FILE__, __LINE__, report.data, report.size);
    bytes_fini(&report);
    if (stall->shut_down)
        log_write(ctx, BHVD_LOG_ERROR, "One or more rank (marked by \"!\") is stalled for longer than %lld seconds. Will "
                  "shutdown.", (long long)(stall->shutdown_ns / 1000000000));
}

static void log_stalled(bhvd_context *ctx, const void *names, size_t size)
{
    log_put(&ctx->log, BHVD_LOG_STALLED, __FILE__, __LINE__, names, size < LINE_BYTES ? size : LINE_BYTES);
}

bhvd_status stall_on_notice(bhvd_context *ctx, struct link *link, struct bytes_reader payload)
{
    if (link->rank != COORDINATOR)
        return BHVD_ERR_PROTOCOL;
    log_stalled(ctx, payload.at, (size_t)(payload.end - payload.at));
    return BHVD_OK;
}

// A notified rank logs where it is (bagua_hvd/core/context.py).
static void notify_missing(bhvd_context *ctx, const struct stall *stall)
{
    for (int rank = 0; rank < ctx->options.size; rank++) {
        const struct bhvd_stalled *missing = &stall->ranks[rank];
        struct bytes text = {0};
        add_names(&text, missing);
        if (missing->operations && rank == COORDINATOR)
            log_stalled(ctx, text.data, text.size);
        else if (missing->operations && ctx->exec.connections.links[rank].state == LINK_OPEN)
            link_send_frame(&ctx->exec.connections.links[rank], FRAME_STALLED, &text, false);  // reading finds broken links
        bytes_fini(&text);
    }
}

int bhvd_context_stalled(bhvd_context *ctx, struct bhvd_stalled *out, int capacity)
{
    int count = 0;
    pthread_mutex_lock(&ctx->stalled.lock);
    const struct bhvd_stalled *ranks = ctx->stalled.ranks;
    for (int rank = 0; ranks && rank < ctx->options.size && count < capacity; rank++)
        if (ranks[rank].operations)
            out[count++] = ranks[rank];
    pthread_mutex_unlock(&ctx->stalled.lock);
    return count;
}

static void shut_down(bhvd_context *ctx, const struct stall *stall)
{
    char ranks[128] = "";
    size_t used = 0;
    int stalled = 0, last = -1;
    for (int rank = rank_set_next(&stall->over_limit, 0); rank >= 0; rank = rank_set_next(&stall->over_limit, rank + 1)) {
        stalled++;
        last = rank;
        if (used < sizeof ranks)
            used += (size_t)snprintf(ranks + used, sizeof ranks - used, "%s%d", used ? ", " : "", rank);
    }
    struct bhvd_error reason;
    error_set(&reason, BHVD_ERR_SHUTDOWN, "Horovod has been shut down. One or more ranks (%s) are stalled for longer "
              "than %lld seconds (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS).", ranks,
              (long long)(stall->shutdown_ns / 1000000000));
    error_blame(&reason, BHVD_CAUSE_TIMEOUT, stalled == 1 ? last : -1);
    context_close(ctx, &reason);
    reason = ctx->closing;
    departure_send_goodbye(ctx);
    executor_fail_with(&ctx->exec, &reason);
}

void stall_check(bhvd_context *ctx)
{
    struct coordinator *c = ctx->coordinator;
    if (ctx->options.rank != 0 || ctx->options.stall_warning_ms <= 0 || (c->pending.count == 0 && !ctx->stalled.ranks))
        return;
    int64_t now_ns = clock_now_ns();
    if (now_ns < c->next_stall_check_ns)
        return;
    c->next_stall_check_ns = now_ns + STALL_CHECK_NS;
    struct stall stall = {
        .now_ns = now_ns,
        .warning_ns = clock_ms_ns(ctx->options.stall_warning_ms),
        .shutdown_ns = clock_ms_ns(ctx->options.stall_shutdown_ms),
        .ranks = calloc((size_t)ctx->options.size, sizeof *stall.ranks),
    };
    if (!stall.ranks || !rank_set_init(&stall.over_limit, ctx->options.size)) {
        free(stall.ranks);
        return;
    }
    for (struct pending *pending = NULL; (pending = pending_next(&c->pending, pending));)
        look_at(ctx, pending, &stall);
    struct bhvd_stalled *before = ctx->stalled.ranks;
    pthread_mutex_lock(&ctx->stalled.lock);
    ctx->stalled.ranks = stall.any ? stall.ranks : NULL;       // kept for bhvd_context_stalled
    pthread_mutex_unlock(&ctx->stalled.lock);
    free(before);
    if (stall.warn || stall.shut_down) {
        log_report(ctx, &stall);
        if (!stall.shut_down || stall.first)     // else they have logged where they are, and now log why they end
            notify_missing(ctx, &stall);
    }
    if (stall.shut_down)
        shut_down(ctx, &stall);
    rank_set_fini(&stall.over_limit);
    if (!stall.any)
        free(stall.ranks);
}
