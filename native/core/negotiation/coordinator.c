#include "core/negotiation/coordinator.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "core/context/response_cache.h"
#include "core/negotiation/inline_payload.h"
#include "core/negotiation/pairwise.h"

bhvd_status coordinator_init(bhvd_context *ctx)
{
    struct coordinator *c = ctx->coordinator = calloc(1, sizeof *c + (size_t)ctx->options.size * sizeof c->requesters[0]);
    if (!c)
        return BHVD_ERR_SYSTEM;
    c->network.beta_ps = ctx->exec.connections.beta_ps;
    for (int rank = 0; rank < ctx->options.size; rank++) {
        const int64_t alpha_ns = ctx->exec.connections.links[rank].round_trip_ns / 2;
        if (c->network.alpha_ns < alpha_ns)
            c->network.alpha_ns = alpha_ns < UINT32_MAX ? (uint32_t)alpha_ns : UINT32_MAX;
    }
    return BHVD_OK;
}

bool coordinator_any_departed(const bhvd_context *ctx, const struct process_set *set, struct bhvd_error *error)
{
    const struct coordinator *c = ctx->coordinator;
    int first = -1;
    for (int i = 0; c->departed_count && i < set->group.size; i++) {
        const int rank = set->group.ranks[i];
        if (c->requesters[rank].departed && (first < 0 || c->requesters[rank].departed < c->requesters[first].departed))
            first = rank;
    }
    if (first >= 0)
        reason_departed(error, first);
    return first >= 0;
}

// No more requests will come from it: none is left that it must repeat in full.
static bool has_joined(const struct coordinator *c, int rank)
{
    return c->requesters[rank].joined && !c->requesters[rank].cache_misses;
}

static bool is_complete(const bhvd_context *ctx, const struct pending *pending)
{
    const struct group *group = &pending->set->group;
    const struct request *first = pending->requests[pending->first];
    const bool of_members = request_is_of_members(first);
    int count = pending->requested_count;
    for (int i = 0; ctx->coordinator->joined_count && i < group->size; i++)
        count += !pending->requests[i] && has_joined(ctx->coordinator, group->ranks[i]) &&
                 (!of_members || request_lists(first, group->ranks[i]));
    return count == (of_members ? (int)first->args.split_count : group->size);
}

static bool can_never_be(const bhvd_context *ctx, const struct pending *pending)
{
    struct bhvd_error error;
    const struct request *first = pending->requests[pending->first];
    for (int i = 0; i < pending->size; i++) {
        const struct request *request = pending->requests[i];
        if (request ? request != first && request_compare(first, 0, request, 0, &error)
                    : has_joined(ctx->coordinator, pending->set->group.ranks[i]))
            return true;
    }
    return false;
}

// After members have revoked an operation, others may never request it: if it cannot be done, it is refused without them.
static bool is_to_be_refused(const bhvd_context *ctx, const struct pending *pending)
{
    struct bhvd_error error;
    return pending->is_revoked && can_never_be(ctx, pending) && pending_check(pending, ctx->coordinator->last_joined, &error);
}

// After a rank has joined: some operations may be complete now, or can never be.
static void check_pending(bhvd_context *ctx)
{
    const struct table *table = &ctx->coordinator->pending;
    for (struct pending *pending = pending_next(table, NULL), *next; pending; pending = next) {
        next = pending_next(table, pending);
        if (is_to_be_refused(ctx, pending))
            refuse_revoked(ctx, pending);
        else if (is_complete(ctx, pending))
            responses_enqueue(ctx->coordinator, pending);
    }
}

static struct operation_key join_key(const bhvd_context *ctx)
{
    return (struct operation_key){process_set_get(&ctx->sets, 0)->number, sizeof JOIN_NAME - 1, JOIN_NAME};
}

static bhvd_status end_join(bhvd_context *ctx)
{
    struct coordinator *c = ctx->coordinator;
    const struct operation_key key = join_key(ctx);
    for (int rank = 0; rank < ctx->options.size; rank++)
        if (!has_joined(c, rank))
            return BHVD_OK;
    // Operations that ranks posted before they joined end before the join does.
    bhvd_status status = responses_send(ctx);
    if (status)
        return status;
    for (int rank = 0; rank < ctx->options.size; rank++)
        c->requesters[rank].joined = false;
    c->joined_count = 0;
    // All ranks have revoked pairwise operations, and request them in full.
    for (struct process_set *set = NULL; (set = process_set_next(&ctx->sets, set));)
        pairwise_release(ctx, set, set->pairwise_count);
    return response_send_join(ctx, &key);
}

static bhvd_status on_join(bhvd_context *ctx, int rank)
{
    struct coordinator *c = ctx->coordinator;
    if (c->requesters[rank].joined)
        return BHVD_OK;
    c->requesters[rank].joined = true;
    c->joined_count++;
    c->last_joined = rank;
    check_pending(ctx);
    return end_join(ctx);
}

static bhvd_status keep_deferred_request(struct coordinator *c, int rank, struct request *request)
{
    struct deferred_request *deferred = malloc(sizeof *deferred);
    if (!deferred)
        return BHVD_ERR_SYSTEM;
    *deferred = (struct deferred_request){NULL, rank, request};
    request_retain(request);
    fifo_put(&c->deferred_requests, deferred, next);
    return BHVD_OK;
}

// Rank `rank` requests `request`: by the id of `entry`, or in full if that is NULL.
static bhvd_status on_request(bhvd_context *ctx, int rank, struct request *request, struct coordinator_entry *entry)
{
    struct coordinator *c = ctx->coordinator;
    struct requester *requester = &c->requesters[rank];
    struct process_set *set = process_set_find(&ctx->sets, request->key.process_set);
    struct bhvd_error error;
    request_retain(request);
    request_release(requester->last);
    requester->last = request;
    requester->operations++;
    if (!set)       // the set was removed: the rank learns it from its own removal
        return c->additions ? keep_deferred_request(c, rank, request) : BHVD_OK;
    if (coordinator_any_departed(ctx, set, &error))
        return response_refuse(ctx, rank, &request->key, &error);
    int index = process_set_index(set, rank);
    if (index < 0 || (OPERATION_TRAITS[request->args.kind].is_of_all && set->group.id != 0) ||
        (request_is_of_members(request) && !request_lists(request, rank)))
        return BHVD_ERR_PROTOCOL;
    if (request->args.kind == BHVD_JOIN)
        return on_join(ctx, rank);
    struct pending *pending = entry ? pending_of(&entry->cached) : NULL;
    if (!pending)
        pending = pending_find(&c->pending, &request->key);
    if (!pending) {
        pending = pending_create(&c->pending, set, index, request);
        if (!pending)
            return BHVD_ERR_SYSTEM;
        if (entry)
            lru_pin(&entry->cached, &pending->entry);
        timeline_begin(&ctx->timeline, &pending->key, TIMELINE_NEGOTIATION,
                       operation_kind_name(request->args.kind, request->args.op));
    } else if (!entry || pending->entry != &entry->cached) {
        lru_unpin(&pending->entry);
    }
    if (pending->requests[index])
        return BHVD_ERR_PROTOCOL;
    pending->requests[index] = request;
    request_retain(request);
    pending->requested_count++;
    timeline_rank_ready(&ctx->timeline, &pending->key, rank);
    if (is_complete(ctx, pending)) {
        if (pending->size > 1) {
            const int64_t waited_ns = requester->at_ns - pending->requested_ns;
            requester->requested_last++;
            requester->waited_ns += waited_ns > 0 ? (uint64_t)waited_ns : 0;
        }
        responses_enqueue(c, pending);
    }
    pending->requested_ns = requester->at_ns;
    return BHVD_OK;
}

static bhvd_status on_cached_request(bhvd_context *ctx, int rank, uint32_t id)
{
    // Looked up for each rank: another rank's request can end an agreement, and free the entry.
    struct coordinator_entry *entry = lru_find_id(&ctx->cache.coordinator, id);
    const struct process_set *set = entry ? process_set_find(&ctx->sets, entry->cached.key.process_set) : NULL;
    int index = set ? process_set_index(set, rank) : -1;
    ctx->coordinator->requesting_rank = rank;
    if (index < 0)
        return response_send_cache_miss(ctx, rank, id);
    if (!entry->cached.user)                    // for the first rank's request only, so the others need not update the order
        lru_touch(&ctx->cache.coordinator, &entry->cached);
    return on_request(ctx, rank, entry->requests[index], entry);
}

// For each id all ranks, so that no operation gets far ahead of the others.
static bhvd_status on_id_range(bhvd_context *ctx, const int *ranks, int count, const struct id_range *range)
{
    bhvd_status status = BHVD_OK;
    for (uint32_t i = 0; i < range->count && !status; i++) {
        for (int j = 0; j < count && !status; j++)
            status = on_cached_request(ctx, ranks[j], range->id + i);
    }
    return status;
}

static bhvd_status check_revoked(bhvd_context *ctx, const struct operation_key *key)
{
    struct pending *pending = pending_find(&ctx->coordinator->pending, key);
    if (!pending)
        return BHVD_OK;                     // all ranks have requested it
    if (!pending->is_revoked)
        pairwise_release(ctx, pending->set, 1);
    pending->is_revoked = true;
    return is_to_be_refused(ctx, pending) ? refuse_revoked(ctx, pending) : BHVD_OK;
}

// Most ranks send exactly the same request as another rank: they share it, which saves the time to parse and
// compare it, and n - 1 copies of it in the cache.
static bhvd_status read_request(struct coordinator *c, const unsigned char *bytes, size_t size, struct request **out)
{
    struct operation_key key;
    if (request_read_key(bytes, size, &key)) {
        const struct pending *pending = pending_find(&c->pending, &key);
        struct request *first = pending ? pending->requests[pending->first] : NULL;
        if (first && first->size == size && memcmp(first->bytes, bytes, size) == 0) {
            request_retain(first);
            *out = first;
            return BHVD_OK;
        }
    }
    return request_parse(bytes, size, out);
}

static bhvd_status on_full_request(bhvd_context *ctx, const int *ranks, int count, const unsigned char *bytes, size_t size,
                                   bool is_revoked)
{
    bhvd_status status = BHVD_OK;
    for (int i = 0; i < count && !status; i++) {
        struct request *request;
        status = read_request(ctx->coordinator, bytes, size, &request);
        const struct process_set *set = request && is_revoked ? process_set_find(&ctx->sets, request->key.process_set) : NULL;
        ctx->coordinator->requesting_rank = ranks[i];
        if (!set || !refuse_late_request(ctx, set, ranks[i], request, &status)) {
            status = status ? status : on_request(ctx, ranks[i], request, NULL);
            if (!status && is_revoked)
                status = check_revoked(ctx, &request->key);
        }
        request_release(request);
    }
    return status;
}

// A request by id, with values. If the id is unknown, the rank is asked for the full request, without values.
static bhvd_status on_inline(bhvd_context *ctx, const int *ranks, int count, struct bytes_reader *r)
{
    const struct inline_payload item = inline_payload_take(r);
    if (!item.values || count != 1)
        return BHVD_ERR_PROTOCOL;
    bhvd_status status = on_cached_request(ctx, ranks[0], item.id);
    const struct coordinator_entry *entry = status ? NULL : lru_find_id(&ctx->cache.coordinator, item.id);
    struct pending *pending = entry ? pending_of(&entry->cached) : NULL;
    const int member = pending ? process_set_index(pending->set, ranks[0]) : -1;
    return member >= 0 && pending->requests[member] ? inline_payload_add(pending, member, &item) : status;
}

// The reply to a CACHE_MISS: the full request, or nothing if the operation is over.
static bhvd_status on_resent(bhvd_context *ctx, const int *ranks, int count, const unsigned char *bytes, size_t size)
{
    struct coordinator *c = ctx->coordinator;
    bool any_joined = false;
    for (int i = 0; i < count; i++) {
        if (!c->requesters[ranks[i]].cache_misses)
            return BHVD_ERR_PROTOCOL;
        c->requesters[ranks[i]].cache_misses--;
        any_joined |= c->requesters[ranks[i]].joined;
    }
    bhvd_status status = size ? on_full_request(ctx, ranks, count, bytes, size, false) : BHVD_OK;
    if (any_joined)
        check_pending(ctx);
    return status ? status : end_join(ctx);
}

static bhvd_status on_items(bhvd_context *ctx, const int *ranks, int count, struct bytes_reader r)
{
    bhvd_status status = BHVD_OK;
    while (r.at < r.end && !status) {
        enum item_tag tag = bytes_take_u8(&r);
        if (tag == ITEM_CACHED) {
            struct id_range range = id_range_take(&r);
            if (!r.failed)
                status = on_id_range(ctx, ranks, count, &range);
        } else if (tag == ITEM_FULL || tag == ITEM_REVOKED || tag == ITEM_RESENT) {
            const struct bytes_reader request = bytes_take_sub(&r);
            const size_t size = (size_t)(request.end - request.at);
            if (r.failed)
                return BHVD_ERR_PROTOCOL;
            status = tag == ITEM_RESENT ? on_resent(ctx, ranks, count, request.at, size)
                                        : on_full_request(ctx, ranks, count, request.at, size, tag == ITEM_REVOKED);
        } else if (tag == ITEM_INLINE) {
            status = on_inline(ctx, ranks, count, &r);
        } else if (tag == ITEM_LEFT) {
            for (int i = 0; i < count; i++)
                coordinator_on_goodbye(ctx, ranks[i]);
        } else {
            return BHVD_ERR_PROTOCOL;
        }
        if (r.failed)
            return BHVD_ERR_PROTOCOL;
    }
    return status;
}

bhvd_status coordinator_on_requests(bhvd_context *ctx, const int *ranks, int count, struct bytes_reader items)
{
    ctx->coordinator->requesting_rank = ranks[0];
    const int64_t begin_ns = ranks[0] == COORDINATOR ? coordinator_time_begin(ctx) : 0;    // for other ranks relay.c measures it
    const int64_t now_ns = ctx->options.stall_warning_ms > 0 ? clock_now_ns() : 0;     // else nobody reads it
    for (int i = 0; i < count; i++)
        ctx->coordinator->requesters[ranks[i]].at_ns = now_ns;
    bhvd_status status = on_items(ctx, ranks, count, items);
    coordinator_time_end(ctx, begin_ns);
    if (status == BHVD_ERR_PROTOCOL && ranks[0] != COORDINATOR)
        return executor_fail_protocol(&ctx->exec, ctx->coordinator->requesting_rank);
    return status;
}

bhvd_status coordinator_respond(bhvd_context *ctx)
{
    const int64_t begin_ns = coordinator_time_begin(ctx);
    bhvd_status status = responses_send(ctx);
    coordinator_time_end(ctx, begin_ns);
    return status;
}

static void end_pending(bhvd_context *ctx, struct pending *pending, const struct bhvd_error *error)
{
    table_remove(&ctx->coordinator->pending, &pending->by_name);
    response_refuse_all(ctx, pending, error);
    pending_free(pending);
}

void coordinator_on_goodbye(bhvd_context *ctx, int rank)
{
    struct coordinator *c = ctx->coordinator;
    if (c->requesters[rank].departed)
        return;                         // it announced its departure earlier (ITEM_LEFT), and goes now
    c->requesters[rank].departed = ++c->departed_count;
    struct bhvd_error error;
    for (struct pending *pending = pending_next(&c->pending, NULL), *next; pending; pending = next) {
        next = pending_next(&c->pending, pending);
        if (coordinator_any_departed(ctx, pending->set, &error))
            end_pending(ctx, pending, &error);
    }
    if (c->joined_count) {
        // Joins can no longer complete: ranks that wait in one get an error.
        const struct operation_key key = join_key(ctx);
        coordinator_any_departed(ctx, process_set_get(&ctx->sets, 0), &error);
        for (int i = 0; i < ctx->options.size; i++) {
            if (c->requesters[i].joined)
                response_refuse(ctx, i, &key, &error);
            c->requesters[i].joined = false;
        }
        c->joined_count = 0;
    }
}

bhvd_status coordinator_set_added(bhvd_context *ctx)
{
    struct coordinator *c = ctx->coordinator;
    if (ctx->options.rank != COORDINATOR)
        return BHVD_OK;
    c->additions--;
    bhvd_status status = BHVD_OK;
    for (struct deferred_request *deferred = fifo_take_all(&c->deferred_requests), *next; deferred; deferred = next) {
        next = deferred->next;
        status = status ? status : on_request(ctx, deferred->rank, deferred->request, NULL);
        if (status == BHVD_ERR_PROTOCOL)
            status = executor_fail_protocol(&ctx->exec, deferred->rank);
        else if (status)
            status = executor_fail(&ctx->exec, BHVD_ERR_SYSTEM, "no memory for a request of rank %d", deferred->rank);
        request_release(deferred->request);
        free(deferred);
    }
    return status;
}

bhvd_status coordinator_set_removed(bhvd_context *ctx, struct process_set *set)
{
    const uint32_t process_set = set->number;
    const struct table *table = &ctx->coordinator->pending;
    struct bhvd_error error;
    if (ctx->options.rank != COORDINATOR)
        return BHVD_OK;
    error_set(&error, BHVD_ERR_UNSUPPORTED, "process set %u was removed while the operation was in flight", process_set);
    for (struct pending *pending = pending_next(table, NULL), *next; pending; pending = next) {
        next = pending_next(table, pending);
        if (pending->set == set)
            end_pending(ctx, pending, &error);
    }
    struct lru_cache *cache = &ctx->cache.coordinator;
    for (struct lru_entry *entry = cache->oldest, *newer; entry; entry = newer) {
        newer = entry->newer;
        if (entry->key.process_set == process_set)
            lru_remove(cache, entry);
    }
    responses_forget_set(ctx->coordinator, set);
    pairwise_release(ctx, set, set->pairwise_count);
    return BHVD_OK;
}

void coordinator_fini(bhvd_context *ctx)
{
    struct coordinator *c = ctx->coordinator;
    if (!c)
        return;
    for (struct pending *pending = pending_next(&c->pending, NULL), *next; pending; pending = next) {
        next = pending_next(&c->pending, pending);
        pending_free(pending);
    }
    table_fini(&c->pending);
    responses_fini(c);
    for (struct deferred_request *deferred; (deferred = fifo_take(&c->deferred_requests, next));) {
        request_release(deferred->request);
        free(deferred);
    }
    bytes_fini(&c->out);
    for (int rank = 0; rank < ctx->options.size; rank++)
        request_release(c->requesters[rank].last);
    free(c);
    ctx->coordinator = NULL;
}
