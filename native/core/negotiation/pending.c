#include "core/negotiation/pending.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/status.h"
#include "core/context/response_cache.h"

static bool pending_has_key(const struct table_node *node, const void *arg)
{
    return operation_key_equals(&TABLE_CONTAINER(node, struct pending, by_name)->key, arg);
}

struct pending *pending_find(const struct table *table, const struct operation_key *key)
{
    struct table_node *node = table_find(table, operation_hash(key), pending_has_key, key);
    return node ? TABLE_CONTAINER(node, struct pending, by_name) : NULL;
}

struct pending *pending_next(const struct table *table, const struct pending *pending)
{
    struct table_node *node = table_next(table, pending ? &pending->by_name : NULL);
    return node ? TABLE_CONTAINER(node, struct pending, by_name) : NULL;
}

struct pending *pending_create(struct table *table, struct process_set *set, int first, const struct request *request)
{
    struct pending *pending = calloc(1, sizeof *pending + (size_t)set->group.size * sizeof pending->requests[0]);
    if (!pending)
        return NULL;
    pending->key = request->key;
    pending->set = set;
    pending->size = set->group.size;
    pending->first = first;
    pending->since_ns = pending->warned_ns = clock_now_ns();
    if (!table_insert(table, &pending->by_name, operation_hash(&pending->key))) {
        free(pending);
        return NULL;
    }
    return pending;
}

struct pending *pending_of(const struct lru_entry *entry)
{
    return entry->user ? TABLE_CONTAINER(entry->user, struct pending, entry) : NULL;
}

void pending_free(struct pending *pending)
{
    lru_unpin(&pending->entry);
    for (int i = 0; i < pending->size; i++)
        request_release(pending->requests[i]);
    free(pending->inline_values);
    free(pending);
}

// Each rank has checked its own splits; invalid ones must not make the others read out of bounds.
static bool splits_fit(const struct request *request, int size)
{
    if (request->args.split_count != 0 && request->args.split_count != (uint32_t)size)
        return false;
    int64_t sum = 0;
    for (uint32_t i = 0; i < request->args.split_count; i++) {
        int64_t split = request_split(request, i);
        if (split < 0 || split > INT32_MAX)
            return false;
        sum += split;
    }
    for (uint32_t t = 0; t < request->args.tensor_count; t++) {
        if (request->tensors[t].ndim && sum > request_dim(&request->tensors[t], 0))
            return false;
    }
    return true;
}

bhvd_status pending_check(const struct pending *pending, int last_joined, struct bhvd_error *error)
{
    const int32_t *ranks = pending->set->group.ranks;
    int lowest = 0;                     // not the first to request it: errors must not name ranks by chance
    while (!pending->requests[lowest])
        lowest++;
    const struct request *first = pending->requests[lowest];
    for (int i = lowest + 1; i < pending->size; i++) {
        if (!pending->requests[i])
            continue;
        bhvd_status status = request_compare(first, ranks[lowest], pending->requests[i], ranks[i], error);
        if (status)
            return status;
    }
    bool by_rows = first->args.kind == BHVD_ALLGATHER || first->args.kind == BHVD_ALLTOALL;
    for (uint32_t t = 0; by_rows && t < first->args.tensor_count; t++) {
        if (first->tensors[t].ndim == 0)
            return error_set(error, BHVD_ERR_MISMATCH, "%s '%.*s': a rank tried to %s a rank-zero tensor.",
                             OPERATION_TRAITS[first->args.kind].word, (int)first->key.name_size, first->key.name,
                             first->args.kind == BHVD_ALLGATHER ? "allgather" : "alltoall");
    }
    bool sums = first->args.kind == BHVD_ALLREDUCE || first->args.kind == BHVD_C_LP_S;        // zeros can be used for joined ranks
    for (int i = 0; first->args.kind == BHVD_ALLTOALL && i < pending->size; i++) {
        if (pending->requests[i] && !splits_fit(pending->requests[i], pending->size))
            return error_set(error, BHVD_ERR_MISMATCH, "Alltoall '%.*s': the splits of rank %d do not fit its tensor.",
                             (int)first->key.name_size, first->key.name, ranks[i]);
    }
    if (first->args.tensor_count * response_count(first->args.kind, pending->size) > REQUEST_BYTES_MAX / sizeof(int64_t))
        return error_set(error, BHVD_ERR_UNSUPPORTED, "%s '%.*s': a group of %zu tensors is more than %d ranks can agree on at "
                         "once; make several groups of it", OPERATION_TRAITS[first->args.kind].word, (int)first->key.name_size,
                         first->key.name, first->args.tensor_count, pending->size);
    if (pending->requested_count < (request_is_of_members(first) ? (int)first->args.split_count : pending->size) && !sums)
        return error_set(error, BHVD_ERR_UNSUPPORTED,
                         "%s is not supported with Join at this time. Rank %d has joined ('%.*s').",
                         OPERATION_TRAITS[first->args.kind].word, last_joined, (int)first->key.name_size, first->key.name);
    return BHVD_OK;
}

static int64_t split_of(const struct pending *pending, uint32_t t, int from, int to)
{
    const struct request *request = pending->requests[from];
    return request->args.split_count ? request_split(request, (uint32_t)to)
                                : request_dim(&request->tensors[t], 0) / pending->size;
}

int64_t pending_longest(const struct pending *pending, uint32_t tensor)
{
    int64_t longest = 0;
    for (int from = 0; from < pending->size; from++) {
        for (int to = 0; to < pending->size; to++) {
            const int64_t rows = split_of(pending, tensor, from, to);
            longest = rows > longest ? rows : longest;
        }
    }
    return longest;
}

void pending_put_numbers(struct bytes *out, const struct pending *pending, int member, const int64_t *longest)
{
    const struct request *first = pending->requests[pending->first];
    bytes_put_u32(out, (uint32_t)(first->args.tensor_count * response_count(first->args.kind, pending->size)));
    for (uint32_t t = 0; t < first->args.tensor_count; t++) {
        for (int from = 0; from < pending->size; from++) {
            if (first->args.kind == BHVD_ALLGATHER)
                bytes_put_i64(out, request_dim(&pending->requests[from]->tensors[t], 0));
            else if (first->args.kind == BHVD_ALLTOALL)
                bytes_put_i64(out, split_of(pending, t, from, member));
        }
        if (first->args.kind == BHVD_ALLTOALL)
            bytes_put_i64(out, longest[t]);
    }
}

static bool one_dtype(const struct request *request)
{
    for (uint32_t t = 1; t < request->args.tensor_count; t++) {
        if (request->tensors[t].dtype != request->tensors[0].dtype)
            return false;
    }
    return true;
}

bool pending_is_fusable(const struct pending *one, const struct pending *other)
{
    const struct request *a = one->requests[one->first], *b = other->requests[other->first];
    return a->key.process_set == b->key.process_set && a->args.kind == BHVD_ALLREDUCE && b->args.kind == BHVD_ALLREDUCE &&
           a->args.op == b->args.op && a->args.prescale_factor == b->args.prescale_factor &&
           a->args.postscale_factor == b->args.postscale_factor && a->args.device == b->args.device &&
           a->tensors[0].dtype == b->tensors[0].dtype && one_dtype(a) && one_dtype(b);
}
