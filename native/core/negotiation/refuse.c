#include "core/negotiation/refuse.h"

#include "core/context/context.h"
#include "core/context/lru_cache.h"
#include "core/negotiation/response.h"

// The link to the refused operation of this key; if there is none, the end of the list.
static struct pending **find_refused(struct coordinator *c, const struct operation_key *key)
{
    struct pending **at = &c->refused.head;
    while (*at && !operation_key_equals(&(*at)->key, key))
        at = &(*at)->next_ready;
    return at;
}

// Members that have not revoked it yet will still request it, once each.
static void keep_refused(struct coordinator *c, struct pending *pending)
{
    lru_unpin(&pending->entry);
    if (pending->requested_count == pending->size)
        pending_free(pending);
    else
        fifo_put(&c->refused, pending, next_ready);
}

static void forget_refused(struct coordinator *c, struct pending **at)
{
    struct pending *pending = fifo_remove(&c->refused, at, next_ready);
    if (pending)
        pending_free(pending);
}

void refuse_forget(struct coordinator *c, const struct operation_key *key) { forget_refused(c, find_refused(c, key)); }

void refuse_forget_set(struct coordinator *c, uint32_t process_set)
{
    for (struct pending **at = &c->refused.head; *at;) {
        if ((*at)->key.process_set == process_set)
            forget_refused(c, at);
        else
            at = &(*at)->next_ready;
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
    pending_check(pending, set, c->last_joined, &error);
    pending->requests[index] = request;
    pending->requested_count++;
    request_retain(request);
    *status = response_refuse(ctx, rank, &request->key, &error);
    if (pending->requested_count == pending->size)
        forget_refused(c, at);
    return true;
}

bhvd_status refuse_operation(bhvd_context *ctx, const struct process_set *set, struct pending *pending,
                             const struct bhvd_error *error)
{
    timeline_negotiation_end(&ctx->timeline, &pending->key);
    timeline_refusal(&ctx->timeline, &pending->key, error->message);
    bhvd_status status = response_refuse_all(ctx, set, pending, error);
    if (pending->is_revoked)
        keep_refused(ctx->coordinator, pending);
    else
        pending_free(pending);
    return status;
}

bhvd_status refuse_revoked(bhvd_context *ctx, const struct process_set *set, struct pending *pending)
{
    struct bhvd_error error;
    pending_check(pending, set, ctx->coordinator->last_joined, &error);
    table_remove(&ctx->coordinator->pending, &pending->by_name);
    return refuse_operation(ctx, set, pending, &error);
}

void refuse_fini(struct coordinator *c)
{
    for (struct pending *pending; (pending = fifo_take(&c->refused, next_ready));)
        pending_free(pending);
}
