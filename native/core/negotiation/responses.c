// The coordinator's responses: one operation, or several fused ones, to all members; an error to all or to one. Members read them
// in member.c.
#include "core/negotiation/coordinator.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "core/context/response_cache.h"
#include "core/negotiation/inline_payload.h"
#include "core/negotiation/pairwise.h"
#include "core/negotiation/relay.h"

// Requests of one rank by unknown ids without a reply, beyond the cache's capacity: far more than a rank ever has.
enum { CACHE_MISS_MAX = 1 << 16 };

// Writes the header of an operation named in full; id: of its new cached agreement, 0: none.
static void put_header(struct bytes *out, const struct operation_key *key, uint32_t id, bhvd_status status)
{
    bytes_put_u8(out, ITEM_FULL);
    bytes_put_u16(out, key->name_size);
    bytes_put(out, key->name, key->name_size);
    bytes_put_u32(out, id);
    bytes_put_u8(out, (uint8_t)status);
}

// Begins a response for `count` operations of `nbytes` in total, in c->out. alone: no other execution may be concurrent.
static void begin_response(struct coordinator *c, uint32_t process_set, uint32_t count, size_t nbytes, bool alone)
{
    struct bytes *out = &c->out;
    out->size = 0;
    c->range = (struct id_range){0};
    bytes_put_i64(out, (int64_t)++c->response_number);
    c->nbytes_of[c->response_number % LINK_MATCH_QUEUES] = alone ? WINDOW_ALONE : nbytes;
    bytes_put_u8(out, (uint8_t)window_of(c->nbytes_of, c->response_number));
    bytes_put_u32(out, c->network.alpha_ns);
    bytes_put_u32(out, c->network.beta_ps);
    bytes_put_u32(out, process_set);
    bytes_put_u32(out, count);
}

// Sends c->out to all members, this rank last, where it becomes an execution.
static bhvd_status send_response(bhvd_context *ctx, const struct process_set *set)
{
    return relay_send_to_set(ctx, set, FRAME_RESPONSE, &ctx->coordinator->out);
}

bhvd_status response_send_join(bhvd_context *ctx, const struct operation_key *key)
{
    struct coordinator *c = ctx->coordinator;
    begin_response(c, key->process_set, 1, 0, true);
    put_header(&c->out, key, 0, BHVD_OK);
    bytes_put_u32(&c->out, 1);
    bytes_put_i64(&c->out, c->last_joined);
    bytes_put_u32(&c->out, 0);
    return send_response(ctx, process_set_get(&ctx->sets, 0));
}

bhvd_status response_refuse(bhvd_context *ctx, int rank, const struct operation_key *key, const struct bhvd_error *error)
{
    struct bytes *out = &ctx->coordinator->out;
    begin_response(ctx->coordinator, key->process_set, 1, 0, false);
    put_header(out, key, 0, error->status);
    reason_put(out, error);
    return relay_send_to(ctx, rank, FRAME_RESPONSE, out);
}

bhvd_status response_refuse_all(bhvd_context *ctx, const struct pending *pending, const struct bhvd_error *error)
{
    bhvd_status status = BHVD_OK;
    timeline_negotiation_end(&ctx->timeline, &pending->key);
    timeline_refusal(&ctx->timeline, &pending->key, error->message);
    for (int i = 0; i < pending->size && !status; i++) {
        if (pending->requests[i])
            status = response_refuse(ctx, pending->set->group.ranks[i], &pending->key, error);
    }
    return status;
}

bhvd_status response_send_cache_miss(bhvd_context *ctx, int rank, uint32_t id)
{
    struct bytes out = {0};
    if (ctx->coordinator->requesters[rank].cache_misses >= CACHE_MISS_MAX + ctx->options.cache_capacity)
        return BHVD_ERR_PROTOCOL;           // it does not reply
    bytes_put_u32(&out, id);
    ctx->coordinator->requesters[rank].cache_misses++;
    bhvd_status status = relay_send_to(ctx, rank, FRAME_CACHE_MISS, &out);
    bytes_fini(&out);
    return status;
}

// ------------------------------------------------------------------------------------------------------------ refusals

// The link to the refused operation of this key; if there is none, the end of the list.
static struct pending **find_refused(struct coordinator *c, const struct operation_key *key)
{
    struct pending **at = &c->refused.head;
    while (*at && !operation_key_equals(&(*at)->key, key))
        at = &(*at)->next;
    return at;
}

static void forget_refused(struct coordinator *c, struct pending **at)
{
    struct pending *pending = fifo_remove(&c->refused, at, next);
    if (pending)
        pending_free(pending);
}

void responses_forget_set(struct coordinator *c, const struct process_set *set)
{
    struct pending *lists[] = {fifo_take_all(&c->refused), fifo_take_all(&c->ready)};
    for (int i = 0; i < 2; i++) {
        for (struct pending *pending = lists[i], *next; pending; pending = next) {
            next = pending->next;
            if (pending->set == set)
                pending_free(pending);
            else if (i)
                fifo_put(&c->ready, pending, next);
            else
                fifo_put(&c->refused, pending, next);
        }
    }
}

bool refuse_late_request(bhvd_context *ctx, const struct process_set *set, int rank, struct request *request, bhvd_status *status)
{
    struct coordinator *c = ctx->coordinator;
    struct pending **at = find_refused(c, &request->key), *pending = *at;
    const int index = process_set_index(set, rank);
    struct bhvd_error error;
    if (!pending || index < 0 || pending->requests[index])
        return false;
    pending_check(pending, c->last_joined, &error);
    pending->requests[index] = request;
    pending->requested_count++;
    request_retain(request);
    *status = response_refuse(ctx, rank, &request->key, &error);
    if (pending->requested_count == pending->size)
        forget_refused(c, at);
    return true;
}

static bhvd_status refuse(bhvd_context *ctx, struct pending *pending, const struct bhvd_error *error)
{
    bhvd_status status = response_refuse_all(ctx, pending, error);
    if (pending->is_revoked && pending->requested_count < pending->size) {
        lru_unpin(&pending->entry);
        fifo_put(&ctx->coordinator->refused, pending, next);    // the others will still request it, once each
    } else {
        pending_free(pending);
    }
    return status;
}

bhvd_status refuse_revoked(bhvd_context *ctx, struct pending *pending)
{
    struct bhvd_error error;
    pending_check(pending, ctx->coordinator->last_joined, &error);
    table_remove(&ctx->coordinator->pending, &pending->by_name);
    return refuse(ctx, pending, &error);
}

// -------------------------------------------------------------------------------------------------------------- fusion

// A fusion group is the list of fused operations, known by its first. Groups are in the order of completion. An operation joins the
// first of this many latest groups that it fits; programs rarely alternate between more kinds.
enum { OPEN_GROUPS = 16 };

void responses_enqueue(struct coordinator *c, struct pending *pending)
{
    table_remove(&c->pending, &pending->by_name);
    fifo_put(&c->ready, pending, next);
}

static struct pending *find_fusion_group(struct pending *const *groups, int count, const struct pending *pending, size_t nbytes,
                                         size_t threshold)
{
    for (int i = 0; i < count; i++) {
        if (nbytes <= threshold - groups[i]->fused_nbytes &&
            pending->requests[pending->first]->size <= REQUEST_BYTES_MAX - groups[i]->fused_request_nbytes &&
            pending_is_fusable(groups[i], pending))
            return groups[i];
    }
    return NULL;
}

static void fuse(struct coordinator *c, size_t threshold)
{
    struct pending *open[OPEN_GROUPS];      // the oldest first
    int count = 0;
    for (struct pending *p = fifo_take_all(&c->ready), *next; p; p = next) {
        const size_t nbytes = request_nbytes(p->requests[p->first]);
        struct pending *fusion = find_fusion_group(open, count, p, nbytes, threshold);
        next = p->next;
        if (fusion) {
            fifo_put(&fusion->fused, p, next);
        } else {
            fusion = p;
            fifo_put(&c->ready, p, next);
            if (nbytes < threshold && pending_is_fusable(p, p)) {
                if (count == OPEN_GROUPS)
                    memmove(open, open + 1, (size_t)--count * sizeof *open);
                open[count++] = p;
            }
        }
        fusion->fused_nbytes += nbytes;
        fusion->fused_request_nbytes += p->requests[p->first]->size;
        fusion->fused_count++;
    }
}

// Refuses operations that cannot be done.
static bhvd_status refuse_some(bhvd_context *ctx)
{
    struct coordinator *c = ctx->coordinator;
    bhvd_status status = BHVD_OK;
    for (struct pending *p = fifo_take_all(&c->ready), *next; p; p = next) {
        struct bhvd_error error;
        next = p->next;
        // If all requested it by one id, they were compared when the id was assigned.
        if (status || (p->entry && p->requested_count == p->size) || !pending_check(p, c->last_joined, &error))
            fifo_put(&c->ready, p, next);
        else
            status = refuse(ctx, p, &error);
    }
    return status;
}

// Writes the part before the response's numbers. False: the response is complete, by id.
static bool put_response_header(bhvd_context *ctx, struct bytes *out, const struct pending *pending)
{
    const struct request *first = pending->requests[pending->first];
    const bool all = pending->requested_count == pending->size;
    uint32_t id = 0;
    if (all && pending->entry) {
        if (inline_payload_is_whole(pending)) {
            inline_payload_put_sum(&ctx->exec, pending, out);
        } else if (pairwise_try_begin(ctx, pending->set, first)) {
            forget_refused(ctx->coordinator, find_refused(ctx->coordinator, &pending->key));    // some members joined instead
            bytes_put_u8(out, ITEM_PAIRWISE);
            bytes_put_u32(out, pending->entry->id);
        } else {
            id_range_put(&ctx->coordinator->range, out, pending->entry->id);
        }
        return false;
    }
    if (all && ctx->cache.capacity && !OPERATION_TRAITS[first->args.kind].changes_sets)
        id = coordinator_cache_store(&ctx->cache, pending->requests, pending->size);
    put_header(out, &pending->key, id, BHVD_OK);
    return true;
}

static void put_response(bhvd_context *ctx, struct bytes *out, const struct pending *pending)
{
    const struct request *first = pending->requests[pending->first];
    const bool all = pending->requested_count == pending->size;
    if (!put_response_header(ctx, out, pending))
        return;
    pending_put_numbers(out, pending, 0, NULL);
    bytes_put_u32(out, all ? 0 : (uint32_t)first->size);        // joined ranks need the request
    if (!all)
        bytes_put(out, first->bytes, first->size);
    if (first->args.kind == BHVD_PROCESS_SET_ADD)
        ctx->coordinator->additions++;
}

// For alltoall, whose responses differ per member; this rank last, as in all responses.
static bhvd_status respond_each(bhvd_context *ctx, const struct pending *pending)
{
    const struct process_set *set = pending->set;
    const struct request *first = pending->requests[pending->first];
    struct bytes *out = &ctx->coordinator->out;
    bhvd_status status = BHVD_OK;
    begin_response(ctx->coordinator, pending->key.process_set, 1, request_nbytes(first), false);
    if (!put_response_header(ctx, out, pending))
        return send_response(ctx, set);
    int64_t *longest = malloc(first->args.tensor_count * sizeof *longest);
    const size_t header_size = out->size;
    for (uint32_t t = 0; t < first->args.tensor_count && longest; t++)
        longest[t] = pending_longest(pending, t);
    for (int i = 1; i <= set->group.size && !status && longest; i++) {
        const int member = i % set->group.size;     // this rank, if a member, has position 0
        out->size = header_size;
        pending_put_numbers(out, pending, member, longest);
        bytes_put_u32(out, 0);
        status = relay_send_to(ctx, set->group.ranks[member], FRAME_RESPONSE, out);
    }
    if (!longest)
        status = executor_fail(&ctx->exec, BHVD_ERR_SYSTEM, "no memory to respond to an operation");
    free(longest);
    return status;
}

// Process sets are added and removed while nothing is in flight, and a rank that has passed a barrier relies on all earlier
// operations being over; Adasum's messages are as long as its tensors.
static bool is_alone(const struct request *request)
{
    const struct bhvd_args *args = &request->args;
    return args->kind == BHVD_BARRIER || OPERATION_TRAITS[args->kind].changes_sets || args->op == BHVD_OP_ADASUM;
}

bhvd_status responses_send(bhvd_context *ctx)
{
    struct coordinator *c = ctx->coordinator;
    if (!c->ready.head)
        return BHVD_OK;
    timeline_cycle(&ctx->timeline);
    bhvd_status status = refuse_some(ctx);
    fuse(c, (size_t)ctx->options.fusion_threshold);
    for (struct pending *fusion; !status && (fusion = fifo_take(&c->ready, next));) {
        const struct process_set *set = fusion->set;
        if (fusion->requests[fusion->first]->args.kind == BHVD_ALLTOALL) {
            timeline_negotiation_end(&ctx->timeline, &fusion->key);
            status = respond_each(ctx, fusion);
            pending_free(fusion);
            continue;
        }
        begin_response(c, fusion->key.process_set, (uint32_t)fusion->fused_count, fusion->fused_nbytes,
                       is_alone(fusion->requests[fusion->first]));
        for (struct pending *p = fusion, *next = p->fused.head; p; p = next, next = next ? next->next : NULL) {
            timeline_negotiation_end(&ctx->timeline, &p->key);
            put_response(ctx, &c->out, p);
            pending_free(p);
        }
        status = send_response(ctx, set);
    }
    return status;
}

void responses_fini(struct coordinator *c)
{
    for (struct pending *pending; (pending = fifo_take(&c->ready, next)) || (pending = fifo_take(&c->refused, next));) {
        for (struct pending *fused; (fused = fifo_take(&pending->fused, next));)
            pending_free(fused);
        pending_free(pending);
    }
}
