#include "core/negotiation/member.h"

#include <stdlib.h>

#include "base/dtype.h"
#include "base/status.h"
#include "core/context/response_cache.h"
#include "core/negotiation/inline_payload.h"
#include "core/negotiation/pairwise.h"
#include "core/negotiation/relay.h"

// ------------------------------------------------------------------------------------------------------------ requests

// The operation in progress that uses this entry; NULL: none.
static struct bhvd_operation *user_of(const struct cache_entry *entry)
{
    return entry->cached.user ? TABLE_CONTAINER(entry->cached.user, struct bhvd_operation, cached) : NULL;
}

static void put_request(bhvd_context *ctx, struct bytes *out, struct id_range *range, struct bhvd_operation *op)
{
    struct cache_entry *entry = ctx->cache.capacity ? lru_find(&ctx->cache.own, &op->key) : NULL;
    if (entry && !entry->cached.user && entry->request.size == op->request.size &&
        memcmp(entry->request.data, op->request.data, op->request.size) == 0) {
        lru_pin(&entry->cached, &op->cached);
        lru_touch(&ctx->cache.own, &entry->cached);
        ctx->counters.cache_hits++;
        if (inline_payload_applies(ctx, op)) {
            inline_payload_put(out, entry->cached.id, op->coll.tensors[0].src, op->coll.tensors[0].nbytes);
        } else {
            id_range_put(range, out, entry->cached.id);
        }
    } else {
        relay_put_request(ctx, out, ITEM_FULL, op);
    }
}

bhvd_status member_request(bhvd_context *ctx, struct bhvd_operation *posted)
{
    struct bytes *out = &ctx->request_frame;
    struct id_range range = {0};
    bhvd_status status = BHVD_OK;
    out->size = 0;
    for (struct bhvd_operation *op = posted, *next; op && !status; op = next) {
        next = op->next;
        if (!process_set_find(&ctx->sets, op->key.process_set)) {
            struct bhvd_error error;
            error_set(&error, BHVD_ERR_UNSUPPORTED, "the process set was removed while '%.*s' was in flight",
                      (int)op->coll.name_size, op->coll.args.name);
            operation_complete(op, &error);
            continue;
        }
        if (op->coll.args.kind == BHVD_JOIN) {
            ctx->has_joined = true;
            if ((status = pairwise_revoke(ctx, NULL, NOBODY_DEPARTED)))
                break;
        }
        op->phase = OPERATION_REQUESTED;
        const enum pairwise_state pairwise = pairwise_post(ctx, op);
        if (pairwise == PAIRWISE_FAILED)
            return ctx->exec.failure.status;
        if (ctx->closing.status && pairwise != PAIRWISE_WAITS)
            operation_complete(op, &ctx->closing);  // it needs a response from the coordinator, which has left
        else if (pairwise == PAIRWISE_NONE)
            put_request(ctx, out, &range, op);
        else if (pairwise == PAIRWISE_REVOKED)
            relay_put_request(ctx, out, ITEM_REVOKED, op);
        if (out->size >= REQUEST_FRAME_BYTES) {
            status = relay_send_requests(ctx, out);
            out->size = 0;
            range = (struct id_range){0};
        }
    }
    return status || (out->size == 0 && !out->failed) ? status : relay_send_requests(ctx, out);
}

bhvd_status member_on_cache_miss(bhvd_context *ctx, struct bytes_reader r)
{
    struct cache_entry *entry = lru_find_id(&ctx->cache.own, bytes_take_u32(&r));
    struct bhvd_operation *op = entry ? user_of(entry) : NULL;
    struct bytes out = {0};
    if (r.failed || (op && op->phase >= OPERATION_AGREED))      // a response used this very id
        return BHVD_ERR_PROTOCOL;
    if (op) {
        lru_remove(&ctx->cache.own, &entry->cached);
        relay_put_request(ctx, &out, ITEM_RESENT, op);
    } else {
        bytes_put_u8(&out, ITEM_RESENT);
        bytes_put_u32(&out, 0);
    }
    bhvd_status status = relay_send_requests(ctx, &out);
    bytes_fini(&out);
    return status;
}

// ------------------------------------------------------------------------------------------------- checks of responses

// Are all row numbers of `count` ranks non-negative, with a total size that fits into memory?
static bool can_be_held(const int64_t *rows, int count, size_t row_nbytes)
{
    size_t nbytes;
    int64_t sum = 0;
    for (int i = 0; i < count; i++) {
        if (rows[i] < 0 || __builtin_add_overflow(sum, rows[i], &sum))
            return false;
    }
    return !__builtin_mul_overflow((size_t)sum, row_nbytes, &nbytes) && nbytes <= PTRDIFF_MAX;
}

// The rank has checked the rows that it sends itself.
static bool agrees_exchanged(const struct process_set *set, const struct bhvd_operation *op, const struct tensor *tensor,
                             const int64_t *received)
{
    const int64_t longest = received[set->group.size];
    size_t nbytes;
    for (int i = 0; i < set->group.size; i++) {
        if (received[i] > longest || operation_split(op, tensor, i, set->group.size) > longest)
            return false;
    }
    return longest <= INT32_MAX && received[set->group.rank] == operation_split(op, tensor, set->group.rank, set->group.size) &&
           !__builtin_mul_overflow((size_t)longest, tensor->row_nbytes, &nbytes) &&
           can_be_held(received, set->group.size, tensor->row_nbytes);
}

bool response_agrees(const struct process_set *set, const struct bhvd_operation *op)
{
    const int64_t *numbers = op->response_numbers;
    const size_t count = op->response_number_count;
    if (op->coll.args.kind == BHVD_JOIN)
        return count == 1 && numbers[0] >= 0 && numbers[0] < set->group.size;
    const size_t per_tensor = response_count(op->coll.args.kind, set->group.size);
    if (set->group.rank < 0 || count != per_tensor * op->coll.args.tensor_count)
        return false;
    for (size_t t = 0; t < op->coll.args.tensor_count && per_tensor; t++) {
        const struct tensor *tensor = &op->coll.tensors[t];
        const int64_t *rows = numbers + t * per_tensor;
        if (!(op->coll.args.kind == BHVD_ALLGATHER
                  ? rows[set->group.rank] == tensor->dim0 && can_be_held(rows, set->group.size, tensor->row_nbytes)
                  : agrees_exchanged(set, op, tensor, rows)))
            return false;
    }
    return true;
}

bool response_continues(const struct execution *execution, const struct bhvd_operation *op)
{
    if (op->key.process_set != execution->process_set)
        return false;
    if (execution->count == 0)
        return true;
    const struct collective *first = execution->colls[0], *next = &op->coll;
    return first->args.kind == BHVD_ALLREDUCE && next->args.kind == BHVD_ALLREDUCE && first->args.op == next->args.op &&
           first->args.prescale_factor == next->args.prescale_factor &&
           first->args.postscale_factor == next->args.postscale_factor &&
           collective_is_on_gpu(first) == collective_is_on_gpu(next);
}

// Can this rank take part with zeros?
static bool has_zeros(const struct request *request)
{
    const struct bhvd_args *args = &request->args;
    bool low_precision = args->kind == BHVD_C_LP_S, floats_only = low_precision || args->op == BHVD_OP_ADASUM;
    if ((args->kind != BHVD_ALLREDUCE && !low_precision) || (low_precision && args->op > BHVD_OP_SUM))
        return false;
    for (size_t t = 0; t < args->tensor_count; t++) {
        bhvd_dtype dtype = request->tensors[t].dtype;
        if (floats_only && !dtype_is_floating(dtype))
            return false;
        if (low_precision && (dtype != request->tensors[0].dtype ||
                              !bhvd_encoded_size(args->codec, dtype, 1, &args->codec_options)))
            return false;
    }
    return true;
}

// ----------------------------------------------------------------------------------------------------------- responses

// Keeps the numbers that the response adds to the request. False: no memory.
static bool keep_numbers(struct bhvd_operation *op, const unsigned char *values, size_t count)
{
    op->response_numbers = op->response_numbers_owned = malloc((count + 1) * sizeof(int64_t));
    op->response_number_count = count;
    if (op->response_numbers_owned)
        memcpy(op->response_numbers_owned, values, count * sizeof(int64_t));
    return op->response_numbers_owned;
}

// Creates a proxy, through which a rank takes part in an operation that it did not post: in an allreduce after it joined, with
// zeros; in adding a process set that only its members requested.
static struct bhvd_operation *proxy_create(bhvd_context *ctx, const struct request *request)
{
    struct bhvd_operation *op = calloc(1, sizeof *op + request->args.tensor_count * sizeof op->tensors[0]);
    if (!op)
        return NULL;
    op->ctx = ctx;
    op->coll.is_proxy = true;
    atomic_init(&op->references, 1);
    op->key.process_set = request->key.process_set;
    op->coll.args = request->args;
    if (request_is_of_members(request)) {
        int32_t *ranks = malloc((request->args.split_count + 1) * sizeof *ranks);
        for (uint32_t i = 0; ranks && i < request->args.split_count; i++) {
            const int64_t rank = request_split(request, i);
            ranks[i] = rank < 0 || rank > INT32_MAX ? -1 : (int32_t)rank;
        }
        op->coll.args.splits = ranks;
        if (!ranks) {
            operation_release(op);
            return NULL;
        }
    }
    op->coll.tensors = op->tensors;
    for (uint32_t t = 0; t < request->args.tensor_count; t++) {
        struct tensor *tensor = &op->coll.tensors[t];
        tensor->dtype = request->tensors[t].dtype;
        tensor->count = 1;
        for (int d = 0; d < request->tensors[t].ndim; d++)
            tensor->count *= (size_t)request_dim(&request->tensors[t], d);
        tensor->nbytes = tensor->count * bhvd_dtype_size(tensor->dtype);
        tensor->result = block_pool_acquire(&result_memory, tensor->nbytes + 1);
        if (!tensor->result) {
            operation_release(op);
            return NULL;
        }
        memset(tensor->result, 0, tensor->nbytes + 1);
        tensor->src = tensor->dst = tensor->result;
    }
    return op;
}

// Reads one full item. *out NULL: nothing to execute here (an error, or this rank does not take part).
static bhvd_status on_full_item(bhvd_context *ctx, uint32_t process_set, struct bytes_reader *r,
                                struct bhvd_operation **out)
{
    const struct operation_key key = operation_key_take(r, process_set);
    uint32_t id = bytes_take_u32(r);
    bhvd_status status = (bhvd_status)bytes_take_u8(r);
    struct bhvd_operation *op = r->failed ? NULL : operation_find(ctx, &key);
    // This rank has joined since it posted this operation, and others reuse the name.
    if (op && (op->is_pairwise || op->phase >= OPERATION_AGREED))
        op = NULL;
    *out = NULL;
    if (status) {
        struct bhvd_error error;
        if (!reason_take(r, status, ctx->options.size, &error))
            return BHVD_ERR_PROTOCOL;
        if (op && op->phase > OPERATION_POSTED)         // this rank has requested it, and waits for the response
            operation_complete(op, &error);
        return BHVD_OK;
    }
    const size_t count = bytes_take_u32(r);
    const unsigned char *numbers = bytes_take(r, count * sizeof(int64_t));
    const struct bytes_reader full_request = bytes_take_sub(r);
    const struct process_set *set = process_set_find(&ctx->sets, process_set);
    if (r->failed)
        return BHVD_ERR_PROTOCOL;
    if (!op && set && full_request.at < full_request.end) {
        struct request *request;
        status = request_parse(full_request.at, (size_t)(full_request.end - full_request.at), &request);
        if (!status && !request_is_of_members(request) && !(has_zeros(request) && ctx->has_joined))
            status = BHVD_ERR_PROTOCOL;
        if (!status && !(op = proxy_create(ctx, request)))
            status = BHVD_ERR_SYSTEM;
        request_release(request);
        if (status)
            return status;
    }
    if (!op)
        return BHVD_OK;
    if (op->phase != (op->coll.is_proxy ? OPERATION_POSTED : OPERATION_REQUESTED) || !set)
        status = BHVD_ERR_PROTOCOL;
    else if (!keep_numbers(op, numbers, count))
        status = BHVD_ERR_SYSTEM;
    else if (!response_agrees(set, op))
        status = BHVD_ERR_PROTOCOL;
    if (status) {
        if (op->coll.is_proxy)
            operation_release(op);
        return status;
    }
    if (id && !op->coll.is_proxy)
        response_cache_store(&ctx->cache, id, &op->request, op->response_numbers, count);
    *out = op;
    return BHVD_OK;
}

// NULL: it has ended, on all ranks, because its process set was removed.
static struct bhvd_operation *take_cached(bhvd_context *ctx, uint32_t id)
{
    struct cache_entry *entry = lru_find_id(&ctx->cache.own, id);
    struct bhvd_operation *op = entry ? user_of(entry) : NULL;
    if (op) {
        op->response_numbers = entry->numbers;
        op->response_number_count = entry->number_count;
    }
    return op;
}

// False: it already has a response, or does not fit into the execution.
static bool add_to_execution(struct execution *execution, struct bhvd_operation *op)
{
    if (!op)
        return true;
    if (op->phase >= OPERATION_AGREED || !response_continues(execution, op))
        return false;
    op->phase = OPERATION_AGREED;
    execution->colls[execution->count++] = &op->coll;
    return true;
}

// Reads the items of `count` operations.
static bhvd_status on_items(bhvd_context *ctx, struct bytes_reader *r, uint32_t count, struct execution *execution)
{
    for (uint32_t covered; count; count -= covered) {
        struct bhvd_operation *op = NULL;
        const uint8_t tag = bytes_take_u8(r);
        bhvd_status status = BHVD_OK;
        covered = 1;
        if (tag == ITEM_INLINE) {
            const struct inline_payload item = inline_payload_take(r);
            op = take_cached(ctx, item.id);
            status = !item.values ? BHVD_ERR_PROTOCOL : op ? inline_payload_keep_sum(op, &item) : BHVD_OK;
        } else if (tag == ITEM_PAIRWISE) {
            const uint32_t id = bytes_take_u32(r);
            op = take_cached(ctx, id);
            status = r->failed ? BHVD_ERR_PROTOCOL : op ? pairwise_begin(ctx, op, id, &execution->network) : BHVD_OK;
        } else if (tag == ITEM_CACHED) {
            const struct id_range range = id_range_take(r);
            covered = range.count;
            bool fits = !r->failed && covered <= count;
            for (uint32_t i = 0; fits && i < covered; i++)
                fits = add_to_execution(execution, take_cached(ctx, range.id + i));
            status = fits ? BHVD_OK : BHVD_ERR_PROTOCOL;
        } else {
            status = on_full_item(ctx, execution->process_set, r, &op);
        }
        if (!status && !add_to_execution(execution, op))
            status = BHVD_ERR_PROTOCOL;
        if (status) {
            if (op && op->coll.is_proxy)
                operation_release(op);
            return status;
        }
    }
    return BHVD_OK;
}

bhvd_status member_on_response(bhvd_context *ctx, struct bytes_reader r)
{
    uint64_t number = (uint64_t)bytes_take_i64(&r);
    uint8_t window = bytes_take_u8(&r);
    const uint32_t alpha_ns = bytes_take_u32(&r), beta_ps = bytes_take_u32(&r);
    uint32_t process_set = bytes_take_u32(&r);
    uint32_t count = bytes_take_u32(&r);
    // Each item takes some bytes, or is an id that this rank knows.
    if (r.failed || window == 0 || window > LINK_MATCH_QUEUES || number < window ||
        count > (uint64_t)(r.end - r.at) + ctx->cache.own.by_id.count)
        return BHVD_ERR_PROTOCOL;
    struct execution *execution = malloc(sizeof *execution + count * sizeof execution->colls[0]);
    if (!execution)
        return BHVD_ERR_SYSTEM;
    *execution = (struct execution){.number = number, .after = number - window, .network = {alpha_ns, beta_ps},
                                     .process_set = process_set};
    bhvd_status status = on_items(ctx, &r, count, execution);
    if (status || execution->count == 0)
        execution_discard(execution);
    else
        fifo_put(&ctx->executions, execution, next);
    return status;
}
