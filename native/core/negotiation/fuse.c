#include "core/negotiation/fuse.h"

#include <stdlib.h>
#include <string.h>

#include "core/negotiation/inline_payload.h"
#include "core/context/context.h"
#include "core/message/frame.h"
#include "core/negotiation/pairwise.h"
#include "core/negotiation/refuse.h"
#include "core/negotiation/response.h"
#include "core/negotiation/response_cache.h"

// A fusion group is the list of fused operations, known by its first. Groups are in the order of completion. An operation joins the
// first of this many latest groups that it fits; programs rarely alternate between more kinds.
enum { OPEN_GROUPS = 16 };

struct open_groups {
    struct pending *groups[OPEN_GROUPS];    // the oldest first
    int count;
};

void fuse_enqueue(struct coordinator *c, struct pending *pending)
{
    table_remove(&c->pending, &pending->by_name);
    fifo_put(&c->ready, pending, next_ready);
}

static struct pending *find_fusion_group(const struct open_groups *open, const struct pending *pending, size_t nbytes,
                                         size_t threshold)
{
    for (int i = 0; i < open->count; i++) {
        if (nbytes <= threshold - open->groups[i]->fused_nbytes &&
            pending->requests[pending->first]->size <= REQUEST_BYTES_MAX - open->groups[i]->fused_request_nbytes &&
            pending_is_fusable(open->groups[i], pending))
            return open->groups[i];
    }
    return NULL;
}

static void open_group(struct open_groups *open, struct pending *fusion)
{
    if (open->count == OPEN_GROUPS)
        memmove(open->groups, open->groups + 1, (size_t)--open->count * sizeof *open->groups);
    open->groups[open->count++] = fusion;
}

static void fuse(struct coordinator *c, size_t threshold)
{
    struct open_groups open = {.count = 0};
    for (struct pending *p = fifo_take_all(&c->ready), *next; p; p = next) {
        const size_t nbytes = request_nbytes(p->requests[p->first]);
        struct pending *fusion = find_fusion_group(&open, p, nbytes, threshold);
        next = p->next_ready;
        if (fusion) {
            fifo_put(&fusion->fused, p, next_fused);
        } else {
            fusion = p;
            fifo_put(&c->ready, p, next_ready);
            if (nbytes < threshold && pending_is_fusable(p, p))
                open_group(&open, p);
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
        const struct process_set *set = process_set_find(&ctx->sets, p->key.process_set);
        next = p->next_ready;
        // If all requested it by one id, they were compared when the id was assigned.
        if (status ||
            (set && ((p->entry && p->requested_count == p->size) || !pending_check(p, set, c->last_joined, &error))))
            fifo_put(&c->ready, p, next_ready);
        else if (set)
            status = refuse_operation(ctx, set, p, &error);
        else
            pending_free(p);
    }
    return status;
}

// Writes the part before the response's numbers. False: the response is complete, by id.
static bool put_response_header(bhvd_context *ctx, struct bytes *out, const struct pending *pending)
{
    const struct request *first = pending->requests[pending->first];
    const bool all = pending->requested_count == pending->size;
    uint32_t id = 0;
    if (all && pending->entry && inline_payload_is_whole(pending)) {
        inline_payload_put_sum(&ctx->exec, pending, out);
        return false;
    }
    if (all && pending->entry && pairwise_try_begin(ctx, process_set_find(&ctx->sets, pending->key.process_set), first)) {
        refuse_forget(ctx->coordinator, &pending->key);         // some members joined instead
        bytes_put_u8(out, ITEM_PAIRWISE);
        bytes_put_u32(out, pending->entry->id);
        return false;
    }
    if (all && pending->entry) {
        id_range_put(&ctx->coordinator->range, out, pending->entry->id);
        return false;
    }
    if (all && ctx->cache->capacity && !OPERATION_TRAITS[first->kind].changes_sets)
        id = coordinator_cache_store(ctx->cache, pending->requests, pending->size);
    response_put_header(out, &pending->key, id, BHVD_OK);
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
    if (first->kind == BHVD_PROCESS_SET_ADD)
        ctx->coordinator->additions++;
}

// For alltoall, whose responses differ per member; this rank last, as in all responses.
static bhvd_status respond_each(bhvd_context *ctx, const struct process_set *set, const struct pending *pending)
{
    const struct request *first = pending->requests[pending->first];
    struct bytes *out = &ctx->coordinator->out;
    bhvd_status status = BHVD_OK;
    response_begin(ctx->coordinator, pending->key.process_set, 1, request_nbytes(first), false);
    if (!put_response_header(ctx, out, pending))
        return response_send(ctx, set);
    int64_t *longest = malloc(first->tensor_count * sizeof *longest);
    const size_t header_size = out->size;
    for (uint32_t t = 0; t < first->tensor_count && longest; t++)
        longest[t] = pending_longest(pending, t);
    for (int i = 1; i <= set->group.size && !status && longest; i++) {
        const int member = i % set->group.size;     // this rank, if a member, has position 0
        out->size = header_size;
        pending_put_numbers(out, pending, member, longest);
        bytes_put_u32(out, 0);
        status = response_send_to(ctx, set->group.ranks[member]);
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
    return request->kind == BHVD_BARRIER || OPERATION_TRAITS[request->kind].changes_sets || request->op == BHVD_OP_ADASUM;
}

bhvd_status fuse_respond(bhvd_context *ctx)
{
    struct coordinator *c = ctx->coordinator;
    if (!c->ready.head)
        return BHVD_OK;
    timeline_cycle(&ctx->timeline);
    bhvd_status status = refuse_some(ctx);
    fuse(c, (size_t)ctx->options.fusion_threshold);
    for (struct pending *fusion; !status && (fusion = fifo_take(&c->ready, next_ready));) {
        const struct process_set *set = process_set_find(&ctx->sets, fusion->key.process_set);
        if (fusion->requests[fusion->first]->kind == BHVD_ALLTOALL) {
            timeline_negotiation_end(&ctx->timeline, &fusion->key);
            status = respond_each(ctx, set, fusion);
            pending_free(fusion);
            continue;
        }
        response_begin(c, fusion->key.process_set, (uint32_t)fusion->fused_count, fusion->fused_nbytes,
                       is_alone(fusion->requests[fusion->first]));
        for (struct pending *p = fusion, *next = p->fused.head; p; p = next, next = next ? next->next_fused : NULL) {
            timeline_negotiation_end(&ctx->timeline, &p->key);
            put_response(ctx, &c->out, p);
            pending_free(p);
        }
        status = response_send(ctx, set);
    }
    return status;
}

void fuse_fini(struct coordinator *c)
{
    for (struct pending *fusion = fifo_take_all(&c->ready), *next_fusion; fusion; fusion = next_fusion) {
        next_fusion = fusion->next_ready;
        for (struct pending *p = fusion, *next = p->fused.head; p; p = next, next = next ? next->next_fused : NULL)
            pending_free(p);
    }
}
