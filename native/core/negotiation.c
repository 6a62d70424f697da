#include "core/negotiation.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/status.h"
#include "core/context.h"

enum { COORDINATOR = 0 };
enum item_tag { ITEM_CACHED = 0, ITEM_FULL = 1 };

static const char *const SHUT_DOWN =
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, "
    "allgather or broadcast a tensor after one of the ranks finished execution.";

static bhvd_status take_requests(bhvd_context *ctx, int rank, struct bytes_reader r);
static bhvd_status take_response(bhvd_context *ctx, struct bytes_reader r);

bhvd_status negotiation_init(bhvd_context *ctx)
{
    struct negotiation *n = &ctx->negotiation;
    n->ready_tail = &n->ready_head;
    n->joined = calloc((size_t)ctx->options.size, sizeof *n->joined);
    n->left = calloc((size_t)ctx->options.size, sizeof *n->left);
    return n->joined && n->left ? BHVD_OK : BHVD_ERR_SYSTEM;
}

// --------------------------------------------------------------------------------------------------------- member

static struct bytes_reader reader_of(const struct bytes *b)
{
    return (struct bytes_reader){b->data, b->data + b->size, false};
}

static void put_request(bhvd_context *ctx, struct bytes *out, struct bhvd_handle *op)
{
    struct operation_key key = {op->process_set, op->name_size, op->name};
    struct cache_entry *entry = ctx->cache.capacity ? response_cache_find(&ctx->cache, &key) : NULL;
    if (entry && !entry->operation && entry->request.size == op->request.size &&
        memcmp(entry->request.data, op->request.data, op->request.size) == 0) {
        entry->operation = op;
        op->cached = entry;
        response_cache_use(&ctx->cache, entry);
        ctx->counters.cache_hits++;
        bytes_put_u8(out, ITEM_CACHED);
        bytes_put_u32(out, entry->id);
    } else {
        ctx->counters.cache_misses++;
        bytes_put_u8(out, ITEM_FULL);
        bytes_put_u32(out, (uint32_t)op->request.size);
        bytes_put(out, op->request.data, op->request.size);
    }
}

static bhvd_status send_requests(bhvd_context *ctx, const struct bytes *out)
{
    if (out->failed)
        return context_fail(ctx, BHVD_ERR_SYSTEM, "no memory to negotiate an operation");
    if (ctx->options.rank == COORDINATOR)
        return take_requests(ctx, COORDINATOR, reader_of(out));
    // An idle coordinator has not posted yet: what it is told now, it reads when it posts. It is a member of set 0; for
    // other sets it may have nothing of its own to wait for, so those requests do wake it.
    struct link *link = &ctx->connections.links[COORDINATOR];
    if (link->state == LINK_LEFT)
        return BHVD_OK;                     // its goodbye ended these operations
    if (link_send_frame(link, FRAME_REQUEST, out, ctx->sets.generation <= 1))
        return context_fail(ctx, BHVD_ERR_PEER_LOST, "the connection to rank %d broke while an operation was announced",
                            COORDINATOR);
    return BHVD_OK;
}

bhvd_status negotiation_request(bhvd_context *ctx, struct bhvd_handle *posted)
{
    struct bytes *out = &ctx->negotiation.out;
    out->size = 0;
    for (struct bhvd_handle *op = posted; op; op = op->next) {
        put_request(ctx, out, op);
        op->announced = true;
    }
    struct bytes message = *out;
    *out = (struct bytes){0};               // the coordinator's answers are written to it meanwhile
    bhvd_status status = send_requests(ctx, &message);
    if (!out->data)
        *out = message;
    else
        bytes_fini(&message);
    return status;
}

static bhvd_status take_stale(bhvd_context *ctx, struct bytes_reader r)
{
    struct cache_entry *entry = response_cache_find_id(&ctx->cache, bytes_take_u32(&r));
    if (r.failed || !entry || !entry->operation)
        return BHVD_OK;                     // answered meanwhile, or never asked: nothing waits for it
    struct bhvd_handle *op = entry->operation;
    response_cache_forget(&ctx->cache, entry);
    struct bytes out = {0};
    put_request(ctx, &out, op);
    bhvd_status status = send_requests(ctx, &out);
    bytes_fini(&out);
    return status;
}

static bool read_agreed(struct bytes_reader *r, struct bhvd_handle *op)
{
    size_t count = bytes_take_u32(r);
    const unsigned char *values = bytes_take(r, count * sizeof(int64_t));
    if (!values)
        return false;
    op->agreed_owned = malloc((count + 1) * sizeof(int64_t));
    if (!op->agreed_owned)
        return false;
    memcpy(op->agreed_owned, values, count * sizeof(int64_t));
    op->agreed = op->agreed_owned;
    op->agreed_count = count;
    return true;
}

// A joined rank takes part in an allreduce that it did not post: with zeros.
static struct bhvd_handle *phantom_create(bhvd_context *ctx, const struct request *request)
{
    struct bhvd_handle *op = calloc(1, sizeof *op + request->tensor_count * sizeof op->tensors[0]);
    if (!op)
        return NULL;
    op->ctx = ctx;
    op->phantom = true;
    atomic_init(&op->references, 1);
    op->kind = request->kind;
    op->process_set = request->key.process_set;
    op->op = request->op;
    op->codec = request->codec;
    op->prescale_factor = request->prescale_factor;
    op->postscale_factor = request->postscale_factor;
    op->tensor_count = request->tensor_count;
    for (uint32_t t = 0; t < request->tensor_count; t++) {
        struct tensor *tensor = &op->tensors[t];
        tensor->dtype = request->tensors[t].dtype;
        tensor->count = 1;
        for (int d = 0; d < request->tensors[t].ndim; d++)
            tensor->count *= (size_t)request_dim(&request->tensors[t], d);
        tensor->nbytes = tensor->count * bhvd_dtype_size(tensor->dtype);
        tensor->result = calloc(1, tensor->nbytes + 1);
        if (!tensor->result) {
            operation_drop(op);
            return NULL;
        }
        tensor->src = tensor->dst = tensor->result;
    }
    return op;
}

// Reads one answered operation. *out NULL: nothing to execute here (an error answer, or not concerned).
static bhvd_status take_full_item(bhvd_context *ctx, uint32_t process_set, struct bytes_reader *r,
                                  struct bhvd_handle **out)
{
    struct operation_key key = {.process_set = process_set};
    key.name_size = bytes_take_u16(r);
    key.name = (const char *)bytes_take(r, key.name_size);
    uint32_t id = bytes_take_u32(r);
    bhvd_status status = (bhvd_status)bytes_take_u8(r);
    struct bhvd_handle *op = r->failed ? NULL : operation_find(ctx, &key);
    *out = NULL;
    if (status) {
        uint16_t size = bytes_take_u16(r);
        const char *message = (const char *)bytes_take(r, size);
        if (op && message) {
            struct bhvd_error error;
            error_set(&error, status, "%.*s", (int)size, message);
            operation_end(op, &error);
        }
        return BHVD_OK;
    }
    struct bhvd_handle agreed = {0};
    if (!read_agreed(r, &agreed))
        return BHVD_ERR_SYSTEM;
    uint32_t request_size = bytes_take_u32(r);
    const unsigned char *bytes = bytes_take(r, request_size);
    if (!op && bytes && request_size) {
        struct request *request = request_parse(bytes, request_size);
        op = request ? phantom_create(ctx, request) : NULL;
        request_drop(request);
        if (!op) {
            free(agreed.agreed_owned);
            return BHVD_ERR_SYSTEM;
        }
    }
    if (op) {
        op->agreed_owned = agreed.agreed_owned;
        op->agreed = agreed.agreed;
        op->agreed_count = agreed.agreed_count;
        if (id && !op->phantom)
            response_cache_store(&ctx->cache, id, op, op->agreed, op->agreed_count);
        *out = op;
    } else {
        free(agreed.agreed_owned);
    }
    return BHVD_OK;
}

static bhvd_status take_item(bhvd_context *ctx, uint32_t process_set, struct bytes_reader *r, struct bhvd_handle **out)
{
    if (bytes_take_u8(r) != ITEM_CACHED)
        return take_full_item(ctx, process_set, r, out);
    struct cache_entry *entry = response_cache_find_id(&ctx->cache, bytes_take_u32(r));
    if (!entry || !entry->operation)
        return BHVD_ERR_SYSTEM;
    *out = entry->operation;
    (*out)->agreed = entry->agreed;
    (*out)->agreed_count = entry->agreed_count;
    return BHVD_OK;
}

static bhvd_status take_response(bhvd_context *ctx, struct bytes_reader r)
{
    uint32_t process_set = bytes_take_u32(&r);
    uint32_t count = bytes_take_u32(&r);
    if (r.failed || count > (size_t)(r.end - r.at))
        return BHVD_ERR_SYSTEM;
    struct execution *execution = malloc(sizeof *execution + count * sizeof execution->operations[0]);
    if (!execution)
        return BHVD_ERR_SYSTEM;
    *execution = (struct execution){.process_set = process_set};
    for (uint32_t i = 0; i < count; i++) {
        struct bhvd_handle *op;
        bhvd_status status = take_item(ctx, process_set, &r, &op);
        if (status || r.failed) {
            free(execution);
            return BHVD_ERR_SYSTEM;
        }
        if (op) {
            op->answered = true;
            execution->operations[execution->count++] = op;
        }
    }
    if (execution->count == 0) {
        free(execution);
        return BHVD_OK;
    }
    *ctx->executions_tail = execution;
    ctx->executions_tail = &execution->next;
    return BHVD_OK;
}

// ---------------------------------------------------------------------------------------------------- coordinator

static bool pending_has_key(const struct table_node *node, const void *arg)
{
    const struct operation_key *a = &TABLE_CONTAINER(node, struct pending, by_name)->key, *b = arg;
    return a->process_set == b->process_set && a->name_size == b->name_size &&
           memcmp(a->name, b->name, a->name_size) == 0;
}

static void pending_free(struct pending *pending)
{
    if (pending->entry)
        pending->entry->pending = NULL;
    for (int i = 0; i < pending->size; i++)
        request_drop(pending->requests[i]);
    free(pending);
}

static struct pending *pending_create(struct negotiation *n, const struct process_set *set, int first,
                                      struct request *request)
{
    struct pending *pending = calloc(1, sizeof *pending + (size_t)set->size * sizeof pending->requests[0]);
    if (!pending)
        return NULL;
    pending->key = request->key;
    pending->size = set->size;
    pending->first = first;
    pending->since_ns = pending->warned_ns = clock_now_ns();
    if (!table_insert(&n->pending, &pending->by_name, operation_hash(&pending->key))) {
        free(pending);
        return NULL;
    }
    return pending;
}

static void put_full_head(struct bytes *out, const struct operation_key *key, uint32_t id, bhvd_status status)
{
    bytes_put_u8(out, ITEM_FULL);
    bytes_put_u16(out, key->name_size);
    bytes_put(out, key->name, key->name_size);
    bytes_put_u32(out, id);
    bytes_put_u8(out, (uint8_t)status);
}

static void put_error_item(struct bytes *out, const struct operation_key *key, const struct bhvd_error *error)
{
    size_t size = strlen(error->message);
    put_full_head(out, key, 0, error->status);
    bytes_put_u16(out, (uint16_t)size);
    bytes_put(out, error->message, size);
}

static void begin_response(struct bytes *out, uint32_t process_set, uint32_t count)
{
    out->size = 0;
    bytes_put_u32(out, process_set);
    bytes_put_u32(out, count);
}

static bhvd_status send_frame(bhvd_context *ctx, int rank, enum frame_type type, const struct bytes *out)
{
    struct link *link = &ctx->connections.links[rank];
    if (link->state != LINK_OPEN)
        return BHVD_OK;                     // it left: it needs no answer
    if (link_send_frame(link, type, out, false))
        return context_fail(ctx, BHVD_ERR_PEER_LOST, "the connection to rank %d broke during negotiation", rank);
    return BHVD_OK;
}

// To all members, this rank last: its part becomes an execution.
static bhvd_status send_response(bhvd_context *ctx, const struct process_set *set)
{
    struct bytes *out = &ctx->negotiation.out;
    bhvd_status status = BHVD_OK;
    bool member = false;
    if (out->failed)
        return context_fail(ctx, BHVD_ERR_SYSTEM, "no memory to answer an operation");
    for (int i = 0; i < set->size && !status; i++) {
        if (set->ranks[i] == COORDINATOR)
            member = true;
        else
            status = send_frame(ctx, set->ranks[i], FRAME_RESPONSE, out);
    }
    if (!status && member)
        status = take_response(ctx, reader_of(out));
    return status;
}

static bool any_left(const bhvd_context *ctx, const struct process_set *set, struct bhvd_error *error)
{
    const struct negotiation *n = &ctx->negotiation;
    for (int i = 0; n->left_count && i < set->size; i++) {
        if (n->left[set->ranks[i]]) {
            error_set(error, BHVD_ERR_SHUTDOWN, "%s (rank %d left the job)", SHUT_DOWN, set->ranks[i]);
            return true;
        }
    }
    return false;
}

static bool is_complete(const bhvd_context *ctx, const struct pending *pending, const struct process_set *set)
{
    int ready = pending->ready_count;
    for (int i = 0; ctx->negotiation.joined_count && i < set->size; i++)
        ready += !pending->requests[i] && ctx->negotiation.joined[set->ranks[i]];
    return ready == set->size;
}

static void mark_ready(struct negotiation *n, struct pending *pending)
{
    table_remove(&n->pending, &pending->by_name);
    *n->ready_tail = pending;
    n->ready_tail = &pending->next_ready;
}

void negotiation_visit(bhvd_context *ctx, void (*visit)(bhvd_context *, struct pending *, void *), void *arg)
{
    struct table *table = &ctx->negotiation.pending;
    for (size_t i = 0; i < table->bucket_count; i++) {
        for (struct table_node *node = table->buckets[i], *next; node; node = next) {
            next = node->next;
            visit(ctx, TABLE_CONTAINER(node, struct pending, by_name), arg);
        }
    }
}

static void visit_joined(bhvd_context *ctx, struct pending *pending, void *arg)
{
    const struct process_set *set = process_set_get(&ctx->sets, pending->key.process_set);
    (void)arg;
    if (set && is_complete(ctx, pending, set))
        mark_ready(&ctx->negotiation, pending);
}

static bhvd_status take_join(bhvd_context *ctx, int rank, const struct request *request)
{
    struct negotiation *n = &ctx->negotiation;
    if (n->joined[rank])
        return BHVD_OK;
    n->joined[rank] = true;
    n->joined_count++;
    n->last_joined = rank;
    if (n->joined_count < ctx->options.size) {
        negotiation_visit(ctx, visit_joined, NULL);
        return BHVD_OK;
    }
    memset(n->joined, 0, (size_t)ctx->options.size * sizeof *n->joined);
    n->joined_count = 0;
    begin_response(&n->out, 0, 1);
    put_full_head(&n->out, &request->key, 0, BHVD_OK);
    bytes_put_u32(&n->out, 1);
    bytes_put_i64(&n->out, n->last_joined);
    bytes_put_u32(&n->out, 0);
    return send_response(ctx, process_set_get(&ctx->sets, 0));
}

static bhvd_status refuse(bhvd_context *ctx, int rank, const struct operation_key *key, const struct bhvd_error *error)
{
    struct bytes *out = &ctx->negotiation.out;
    begin_response(out, key->process_set, 1);
    put_error_item(out, key, error);
    return rank == COORDINATOR ? take_response(ctx, reader_of(out)) : send_frame(ctx, rank, FRAME_RESPONSE, out);
}

static bhvd_status keep_early(struct negotiation *n, int rank, struct request *request)
{
    struct early_request *early = malloc(sizeof *early), **tail = &n->early;
    if (!early)
        return BHVD_ERR_SYSTEM;
    *early = (struct early_request){NULL, rank, request};
    request_hold(request);
    while (*tail)
        tail = &(*tail)->next;
    *tail = early;
    return BHVD_OK;
}

// Rank `rank` asks for `request`; by the id of `entry`, or in full when that is NULL.
static bhvd_status take_request(bhvd_context *ctx, int rank, struct request *request, struct coordinator_entry *entry)
{
    struct negotiation *n = &ctx->negotiation;
    const struct process_set *set = process_set_get(&ctx->sets, request->key.process_set);
    struct bhvd_error error;
    if (!set)       // a set that is gone: the rank learns it from its own removal
        return n->additions ? keep_early(n, rank, request) : BHVD_OK;
    if (any_left(ctx, set, &error))
        return refuse(ctx, rank, &request->key, &error);
    if (request->kind == BHVD_JOIN)
        return take_join(ctx, rank, request);
    int index = process_set_index(set, rank);
    if (index < 0)
        return BHVD_ERR_SYSTEM;
    struct pending *pending = entry ? entry->pending : NULL;
    if (!pending) {
        struct table_node *node =
            table_find(&n->pending, operation_hash(&request->key), pending_has_key, &request->key);
        pending = node ? TABLE_CONTAINER(node, struct pending, by_name) : NULL;
    }
    if (!pending) {
        pending = pending_create(n, set, index, request);
        if (!pending)
            return BHVD_ERR_SYSTEM;
        pending->entry = entry;
        if (entry)
            entry->pending = pending;
        timeline_negotiation_begin(ctx, &pending->key, operation_kind_name(request->kind, request->op));
    } else if (pending->entry != entry && pending->entry) {
        pending->entry->pending = NULL;
        pending->entry = NULL;
    }
    if (pending->requests[index])
        return BHVD_ERR_SYSTEM;
    pending->requests[index] = request;
    request_hold(request);
    pending->ready_count++;
    timeline_rank_ready(ctx, &pending->key, rank);
    if (is_complete(ctx, pending, set))
        mark_ready(n, pending);
    return BHVD_OK;
}

static bhvd_status take_cached_request(bhvd_context *ctx, int rank, uint32_t id)
{
    struct coordinator_entry *entry = coordinator_cache_find_id(&ctx->cache, id);
    const struct process_set *set = entry ? process_set_get(&ctx->sets, entry->key.process_set) : NULL;
    int index = set ? process_set_index(set, rank) : -1;
    if (index >= 0) {
        coordinator_cache_use(&ctx->cache, entry);
        return take_request(ctx, rank, entry->requests[index], entry);
    }
    struct bytes out = {0};
    bytes_put_u32(&out, id);
    bhvd_status status = rank == COORDINATOR ? take_stale(ctx, reader_of(&out)) : send_frame(ctx, rank, FRAME_STALE, &out);
    bytes_fini(&out);
    return status;
}

static bhvd_status take_requests(bhvd_context *ctx, int rank, struct bytes_reader r)
{
    while (r.at < r.end) {
        bhvd_status status;
        if (bytes_take_u8(&r) == ITEM_CACHED) {
            uint32_t id = bytes_take_u32(&r);
            status = r.failed ? BHVD_ERR_SYSTEM : take_cached_request(ctx, rank, id);
        } else {
            uint32_t size = bytes_take_u32(&r);
            const unsigned char *bytes = bytes_take(&r, size);
            struct request *request = bytes ? request_parse(bytes, size) : NULL;
            status = request ? take_request(ctx, rank, request, NULL) : BHVD_ERR_SYSTEM;
            request_drop(request);
        }
        if (status)
            return status;
    }
    return BHVD_OK;
}

// Do all members ask for the same, and can it be done?
static bhvd_status check_pending(const bhvd_context *ctx, const struct pending *pending, const struct process_set *set,
                                 struct bhvd_error *error)
{
    const struct request *first = pending->requests[pending->first];
    for (int i = 0; i < pending->size; i++) {
        if (!pending->requests[i] || i == pending->first)
            continue;
        bhvd_status status = request_compare(first, set->ranks[pending->first], pending->requests[i], set->ranks[i],
                                             error);
        if (status)
            return status;
    }
    bool by_rows = first->kind == BHVD_ALLGATHER || first->kind == BHVD_ALLTOALL;
    for (uint32_t t = 0; by_rows && t < first->tensor_count; t++) {
        if (first->tensors[t].ndim == 0)
            return error_set(error, BHVD_ERR_MISMATCH, "%s '%.*s': a rank tried to %s a rank-zero tensor.",
                             operation_kind_word(first->kind), (int)first->key.name_size, first->key.name,
                             first->kind == BHVD_ALLGATHER ? "allgather" : "alltoall");
    }
    bool sums = first->kind == BHVD_ALLREDUCE || first->kind == BHVD_C_LP_S;        // zeros can stand in
    if (pending->ready_count < pending->size && !sums)
        return error_set(error, BHVD_ERR_UNSUPPORTED,
                         "%s is not supported with Join at this time. Rank %d has joined ('%.*s').",
                         operation_kind_word(first->kind), ctx->negotiation.last_joined, (int)first->key.name_size,
                         first->key.name);
    return BHVD_OK;
}

static int64_t split_of(const struct pending *pending, uint32_t t, int from, int to)
{
    const struct request *request = pending->requests[from];
    return request->split_count ? request_split(request, (uint32_t)to)
                                : request_dim(&request->tensors[t], 0) / pending->size;
}

static void put_agreed(struct bytes *out, const struct pending *pending)
{
    const struct request *first = pending->requests[pending->first];
    size_t count_at = out->size;
    bytes_put_u32(out, 0);
    for (uint32_t t = 0; t < first->tensor_count; t++) {
        for (int from = 0; from < pending->size; from++) {
            if (first->kind == BHVD_ALLGATHER)
                bytes_put_i64(out, request_dim(&pending->requests[from]->tensors[t], 0));
            for (int to = 0; first->kind == BHVD_ALLTOALL && to < pending->size; to++)
                bytes_put_i64(out, split_of(pending, t, from, to));
        }
    }
    uint32_t count = (uint32_t)((out->size - count_at - sizeof count) / sizeof(int64_t));
    if (!out->failed)
        memcpy(out->data + count_at, &count, sizeof count);
}

static void put_answer(bhvd_context *ctx, struct bytes *out, struct pending *pending)
{
    const struct request *first = pending->requests[pending->first];
    bool all = pending->ready_count == pending->size;
    if (all && pending->entry) {
        bytes_put_u8(out, ITEM_CACHED);
        bytes_put_u32(out, pending->entry->id);
        return;
    }
    uint32_t id = 0;
    // Process sets are not cached: the same name, asked again, is not the same thing done again.
    if (all && ctx->cache.capacity && first->kind < BHVD_PROCESS_SET_ADD)
        id = coordinator_cache_store(&ctx->cache, pending->requests, pending->size);
    put_full_head(out, &pending->key, id, BHVD_OK);
    put_agreed(out, pending);
    bytes_put_u32(out, all ? 0 : (uint32_t)first->size);        // joined ranks learn what it is about
    if (!all)
        bytes_put(out, first->bytes, first->size);
    if (first->kind == BHVD_PROCESS_SET_ADD)
        ctx->negotiation.additions++;
}

static bool one_dtype(const struct request *request)
{
    for (uint32_t t = 1; t < request->tensor_count; t++) {
        if (request->tensors[t].dtype != request->tensors[0].dtype)
            return false;
    }
    return true;
}

static bool fusable(const struct pending *one, const struct pending *other)
{
    const struct request *a = one->requests[one->first], *b = other->requests[other->first];
    return a->key.process_set == b->key.process_set && a->kind == BHVD_ALLREDUCE && b->kind == BHVD_ALLREDUCE &&
           a->op == b->op && a->prescale_factor == b->prescale_factor && a->postscale_factor == b->postscale_factor &&
           a->device == b->device && a->tensors[0].dtype == b->tensors[0].dtype && one_dtype(a) && one_dtype(b);
}

// Takes from the ready list what goes together with its head, up to the fusion threshold.
static struct pending *take_fused(bhvd_context *ctx, int *count)
{
    struct negotiation *n = &ctx->negotiation;
    struct pending *head = n->ready_head, *fused = NULL, **fused_tail = &fused;
    size_t threshold = (size_t)ctx->options.fusion_threshold;
    size_t nbytes = request_nbytes(head->requests[head->first]);
    *count = 0;
    for (struct pending **at = &n->ready_head, *p; (p = *at);) {
        bool take = p == head;
        if (!take && threshold && fusable(head, p)) {
            size_t more = request_nbytes(p->requests[p->first]);
            take = nbytes + more <= threshold;
            nbytes += take ? more : 0;
        }
        if (take) {
            *at = p->next_ready;
            p->next_ready = NULL;
            *fused_tail = p;
            fused_tail = &p->next_ready;
            ++*count;
        } else {
            at = &p->next_ready;
        }
    }
    n->ready_tail = &n->ready_head;
    while (*n->ready_tail)
        n->ready_tail = &(*n->ready_tail)->next_ready;
    return fused;
}

// Answers those that cannot be done, and removes them from the ready list.
static bhvd_status respond_errors(bhvd_context *ctx)
{
    struct negotiation *n = &ctx->negotiation;
    bhvd_status status = BHVD_OK;
    for (struct pending **at = &n->ready_head, *p; (p = *at) && !status;) {
        struct bhvd_error error;
        const struct process_set *set = process_set_get(&ctx->sets, p->key.process_set);
        // all by one id: checked when the id was given
        if (set && ((p->entry && p->ready_count == p->size) || !check_pending(ctx, p, set, &error))) {
            at = &p->next_ready;
            continue;
        }
        *at = p->next_ready;
        if (set) {
            timeline_negotiation_end(ctx, &p->key);
            begin_response(&n->out, p->key.process_set, 1);
            put_error_item(&n->out, &p->key, &error);
            status = send_response(ctx, set);
        }
        pending_free(p);
    }
    n->ready_tail = &n->ready_head;
    while (*n->ready_tail)
        n->ready_tail = &(*n->ready_tail)->next_ready;
    return status;
}

bhvd_status negotiation_respond(bhvd_context *ctx)
{
    struct negotiation *n = &ctx->negotiation;
    if (!n->ready_head)
        return BHVD_OK;
    timeline_cycle(ctx);
    bhvd_status status = respond_errors(ctx);
    while (!status && n->ready_head) {
        int count;
        struct pending *fused = take_fused(ctx, &count);
        const struct process_set *set = process_set_get(&ctx->sets, fused->key.process_set);
        begin_response(&n->out, fused->key.process_set, (uint32_t)count);
        for (struct pending *p = fused, *next; p; p = next) {
            next = p->next_ready;
            timeline_negotiation_end(ctx, &p->key);
            put_answer(ctx, &n->out, p);
            pending_free(p);
        }
        status = send_response(ctx, set);
    }
    return status;
}

static void end_pending(bhvd_context *ctx, struct pending *pending, const struct bhvd_error *error)
{
    struct negotiation *n = &ctx->negotiation;
    const struct process_set *set = process_set_get(&ctx->sets, pending->key.process_set);
    table_remove(&n->pending, &pending->by_name);
    for (int i = 0; set && i < pending->size; i++) {
        if (pending->requests[i])
            refuse(ctx, set->ranks[i], &pending->key, error);
    }
    pending_free(pending);
}

static void visit_left(bhvd_context *ctx, struct pending *pending, void *arg)
{
    const struct process_set *set = process_set_get(&ctx->sets, pending->key.process_set);
    struct bhvd_error error;
    (void)arg;
    if (set && any_left(ctx, set, &error))
        end_pending(ctx, pending, &error);
}

static bhvd_status take_goodbye(bhvd_context *ctx, struct link *link, struct bytes_reader r)
{
    struct negotiation *n = &ctx->negotiation;
    link->state = LINK_LEFT;
    if (r.at < r.end) {
        bhvd_status reason = (bhvd_status)bytes_take_u8(&r);
        return context_fail(ctx, reason, "%.*s", (int)(r.end - r.at), (const char *)r.at);
    }
    if (link->rank == COORDINATOR)
        context_close(ctx, BHVD_ERR_SHUTDOWN, "%s (rank %d left the job)", SHUT_DOWN, COORDINATOR);
    if (ctx->options.rank == COORDINATOR) {
        n->left[link->rank] = true;
        n->left_count++;
        negotiation_visit(ctx, visit_left, NULL);
        if (n->joined_count) {
            // Joins can no longer complete: who waits in one must hear it.
            struct operation_key key = {0, sizeof JOIN_NAME - 1, JOIN_NAME};
            struct bhvd_error error;
            any_left(ctx, process_set_get(&ctx->sets, 0), &error);
            for (int rank = 0; rank < ctx->options.size; rank++) {
                if (n->joined[rank])
                    refuse(ctx, rank, &key, &error);
            }
        }
    }
    return BHVD_OK;
}

bhvd_status negotiation_frame(bhvd_context *ctx, struct link *link, uint8_t type, struct bytes_reader payload)
{
    bool coordinator = ctx->options.rank == COORDINATOR;
    bhvd_status status = BHVD_ERR_SYSTEM;
    if (type == FRAME_GOODBYE)
        status = take_goodbye(ctx, link, payload);
    else if (type == FRAME_REQUEST && coordinator)
        status = take_requests(ctx, link->rank, payload);
    else if (type == FRAME_RESPONSE && link->rank == COORDINATOR)
        status = take_response(ctx, payload);
    else if (type == FRAME_STALE && link->rank == COORDINATOR)
        status = take_stale(ctx, payload);
    return status;
}

bhvd_status negotiation_set_added(bhvd_context *ctx)
{
    struct negotiation *n = &ctx->negotiation;
    if (ctx->options.rank != COORDINATOR)
        return BHVD_OK;
    n->additions--;
    struct early_request *early = n->early;
    bhvd_status status = BHVD_OK;
    n->early = NULL;
    while (early) {
        struct early_request *next = early->next;
        if (!status)
            status = take_request(ctx, early->rank, early->request, NULL);
        request_drop(early->request);
        free(early);
        early = next;
    }
    return status;
}

struct removed_set {
    uint32_t id;
    struct bhvd_error error;
};

static void visit_removed(bhvd_context *ctx, struct pending *pending, void *arg)
{
    struct removed_set *removed = arg;
    if (pending->key.process_set == removed->id)
        end_pending(ctx, pending, &removed->error);
}

bhvd_status negotiation_set_removed(bhvd_context *ctx, uint32_t process_set)
{
    if (ctx->options.rank != COORDINATOR)
        return BHVD_OK;
    struct removed_set removed = {.id = process_set};
    error_set(&removed.error, BHVD_ERR_UNSUPPORTED, "process set %u was removed while the operation was in flight",
              process_set);
    negotiation_visit(ctx, visit_removed, &removed);
    coordinator_cache_forget_set(&ctx->cache, process_set);
    return BHVD_OK;
}

void negotiation_leave(bhvd_context *ctx)
{
    struct bytes reason = {0};
    if (ctx->negotiation.said_goodbye)
        return;
    ctx->negotiation.said_goodbye = true;
    if (ctx->failure.status && ctx->failure.status != BHVD_ERR_SHUTDOWN) {
        bytes_put_u8(&reason, (uint8_t)ctx->failure.status);
        bytes_put(&reason, ctx->failure.message, strlen(ctx->failure.message));
    }
    for (int rank = 0; rank < ctx->options.size; rank++) {
        struct link *link = &ctx->connections.links[rank];
        if (rank != ctx->options.rank && link->state == LINK_OPEN)
            link_send_frame(link, FRAME_GOODBYE, &reason, false);
    }
    bytes_fini(&reason);
}

static void free_pending_node(struct table_node *node, void *arg)
{
    (void)arg;
    pending_free(TABLE_CONTAINER(node, struct pending, by_name));
}

void negotiation_fini(bhvd_context *ctx)
{
    struct negotiation *n = &ctx->negotiation;
    table_clear(&n->pending, free_pending_node, NULL);
    for (struct pending *p = n->ready_head, *next; p; p = next) {
        next = p->next_ready;
        pending_free(p);
    }
    for (struct early_request *early = n->early, *next; early; early = next) {
        next = early->next;
        request_drop(early->request);
        free(early);
    }
    bytes_fini(&n->out);
    free(n->joined);
    free(n->left);
}
