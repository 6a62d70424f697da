#include "core/message/request.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/status.h"

const struct operation_traits OPERATION_TRAITS[OPERATION_KINDS] = {
    [BHVD_ALLREDUCE] = {"ALLREDUCE", "Allreduce", .has_tensors = true},
    [BHVD_ALLGATHER] = {"ALLGATHER", "Allgather", .has_tensors = true},
    [BHVD_BROADCAST] = {"BROADCAST", "Broadcast", .has_tensors = true},
    [BHVD_ALLTOALL] = {"ALLTOALL", "Alltoall", .has_tensors = true},
    [BHVD_REDUCESCATTER] = {"REDUCESCATTER", "Reducescatter", .has_tensors = true},
    [BHVD_BARRIER] = {"BARRIER", "Barrier"},
    [BHVD_JOIN] = {"JOIN", "Join", .is_of_all = true},
    [BHVD_C_LP_S] = {"C_LP_S", "Low-precision allreduce", .has_tensors = true, .has_one_dtype = true},
    [BHVD_D_FP_S] = {"D_FP_S", "Decentralized averaging", .has_tensors = true, .has_one_dtype = true},
    [BHVD_D_LP_S] = {"D_LP_S", "Decentralized low-precision exchange", .has_tensors = true, .has_one_dtype = true},
    [BHVD_PROCESS_SET_ADD] = {"PROCESS_SET_ADD", "Process set addition", .is_of_all = true, .changes_sets = true},
    [BHVD_PROCESS_SET_REMOVE] = {"PROCESS_SET_REMOVE", "Process set removal", .is_of_all = true, .changes_sets = true},
};

const char *operation_kind_name(bhvd_kind kind, bhvd_op op)
{
    return kind == BHVD_ALLREDUCE && op == BHVD_OP_ADASUM ? "ADASUM" : OPERATION_TRAITS[kind].name;
}

void request_write(struct bytes *out, uint32_t process_set, const struct bhvd_args *args)
{
    size_t name_size = strlen(args->name);
    bytes_put_u32(out, process_set);
    bytes_put_u16(out, (uint16_t)name_size);
    bytes_put(out, args->name, name_size);
    bytes_put_u8(out, (uint8_t)args->kind);
    bytes_put_u8(out, (uint8_t)args->op);
    bytes_put_u8(out, (uint8_t)args->codec);
    bytes_put_f64(out, args->codec_options.parameter);
    bytes_put_u8(out, (uint8_t)args->exchange);
    bytes_put_u8(out, (uint8_t)args->topology);
    bytes_put_i64(out, args->round);
    bytes_put_u8(out, args->hierarchical != 0);
    bytes_put_u8(out, args->device >= 0);       // not which GPU: members' requests then have equal bytes
    bytes_put_i64(out, args->root_rank);
    bytes_put_f64(out, args->prescale_factor);
    bytes_put_f64(out, args->postscale_factor);
    bytes_put_u32(out, (uint32_t)args->tensor_count);
    for (size_t t = 0; t < args->tensor_count; t++) {
        const struct bhvd_tensor *tensor = &args->tensors[t];
        bytes_put_u8(out, (uint8_t)tensor->dtype);
        bytes_put_u8(out, (uint8_t)tensor->ndim);
        bytes_put(out, tensor->shape, (size_t)tensor->ndim * sizeof(int64_t));
    }
    bytes_put_u32(out, (uint32_t)args->split_count);
    for (size_t i = 0; i < args->split_count; i++)
        bytes_put_i64(out, args->splits[i]);
}

bool request_read_key(const unsigned char *bytes, size_t size, struct operation_key *key)
{
    struct bytes_reader r = {bytes, bytes + size, false};
    *key = operation_key_take(&r, bytes_take_u32(&r));
    return !r.failed;
}

static bool shape_is_possible(const struct request_tensor *tensor)
{
    int64_t count = 1;
    for (int d = 0; d < tensor->ndim && count >= 0; d++)
        count = operation_count(count, request_dim(tensor, d));
    return count >= 0;
}

static int32_t take_i32(struct bytes_reader *r)
{
    const int64_t value = bytes_take_i64(r);
    r->failed |= value != (int32_t)value;
    return (int32_t)value;
}

// Reads everything before the tensors. False: malformed.
static bool take_fields(struct bytes_reader *r, struct operation_key *key, struct bhvd_args *args)
{
    *key = operation_key_take(r, bytes_take_u32(r));
    args->kind = bytes_take_u8(r);
    args->op = bytes_take_u8(r);
    args->codec = bytes_take_u8(r);
    args->codec_options.parameter = bytes_take_f64(r);
    args->exchange = bytes_take_u8(r);
    args->topology = bytes_take_u8(r);
    args->round = take_i32(r);
    args->hierarchical = bytes_take_u8(r) != 0;
    args->device = bytes_take_u8(r) ? 0 : -1;
    args->root_rank = take_i32(r);
    args->prescale_factor = bytes_take_f64(r);
    args->postscale_factor = bytes_take_f64(r);
    args->tensor_count = bytes_take_u32(r);
    return !r->failed && args->kind < OPERATION_KINDS && args->op <= BHVD_OP_PRODUCT && args->codec < BHVD_CODEC_COUNT &&
           args->exchange <= BHVD_EXCHANGE_ALLGATHER && args->topology <= BHVD_TOPOLOGY_ROUND_ROBIN &&
           OPERATION_TRAITS[args->kind].has_tensors == (args->tensor_count > 0);
}

static bool take_tensors(struct bytes_reader *r, struct request *request)
{
    for (uint32_t t = 0; t < request->args.tensor_count; t++) {
        struct request_tensor *tensor = &request->tensors[t];
        tensor->dtype = bytes_take_u8(r);
        tensor->ndim = bytes_take_u8(r);
        tensor->dims = bytes_take(r, tensor->ndim * sizeof(int64_t));
        if (r->failed || tensor->dtype >= BHVD_DTYPE_COUNT || !shape_is_possible(tensor))
            return false;
    }
    request->args.split_count = bytes_take_u32(r);
    request->splits = bytes_take(r, request->args.split_count * sizeof(int64_t));
    return !r->failed && r->at == r->end;
}

bhvd_status request_parse(const unsigned char *bytes, size_t size, struct request **out)
{
    struct request fields = {.references = 1, .size = size};
    *out = NULL;
    if (size > REQUEST_BYTES_MAX)
        return BHVD_ERR_PROTOCOL;
    if (!(fields.bytes = malloc(size + 1)))
        return BHVD_ERR_SYSTEM;
    if (size)
        memcpy(fields.bytes, bytes, size);
    struct bytes_reader r = {fields.bytes, fields.bytes + size, false};
    // A tensor takes at least two bytes.
    const bool is_possible = take_fields(&r, &fields.key, &fields.args) && fields.args.tensor_count <= size / 2;
    struct request *request = is_possible ? malloc(sizeof *request + fields.args.tensor_count * sizeof request->tensors[0]) : NULL;
    if (request)
        memcpy(request, &fields, sizeof fields);
    if (request && take_tensors(&r, request)) {
        *out = request;
        return BHVD_OK;
    }
    const bool lacks_memory = is_possible && !request;
    free(request);
    free(fields.bytes);
    return lacks_memory ? BHVD_ERR_SYSTEM : BHVD_ERR_PROTOCOL;
}

void request_retain(struct request *request) { request->references++; }

void request_release(struct request *request)
{
    if (!request || --request->references)
        return;
    free(request->bytes);
    free(request);
}

static int64_t read_i64(const unsigned char *p, size_t i)
{
    int64_t v;
    memcpy(&v, p + i * sizeof v, sizeof v);
    return v;
}

int64_t request_dim(const struct request_tensor *tensor, int i) { return read_i64(tensor->dims, (size_t)i); }

int64_t request_split(const struct request *request, uint32_t i) { return read_i64(request->splits, i); }

bool request_is_speculative(const struct request *request)
{
    return request->args.root_rank == 2 && (request->args.kind == BHVD_ALLTOALL || request->args.kind == BHVD_PROCESS_SET_ADD);
}

// As in requests that are not speculative.
static int root_of(const struct request *request)
{
    return request_is_speculative(request) ? request->args.kind == BHVD_PROCESS_SET_ADD : request->args.root_rank;
}

bool request_is_of_members(const struct request *request)
{
    return request->args.kind == BHVD_PROCESS_SET_ADD && request->args.root_rank != 0;
}

bool request_lists(const struct request *request, int rank)
{
    for (uint32_t i = 0; i < request->args.split_count; i++) {
        if (request_split(request, i) == rank)
            return true;
    }
    return false;
}

size_t request_nbytes(const struct request *request)
{
    size_t nbytes = 0;
    for (uint32_t t = 0; t < request->args.tensor_count; t++) {
        size_t count = 1;
        for (int d = 0; d < request->tensors[t].ndim; d++)
            count *= (size_t)request_dim(&request->tensors[t], d);
        nbytes += count * bhvd_dtype_size(request->tensors[t].dtype);
    }
    return nbytes;
}

void request_format_shape(char *out, size_t size, const struct request_tensor *tensor)
{
    size_t at = (size_t)snprintf(out, size, "[");
    for (int d = 0; d < tensor->ndim && at < size; d++)
        at += (size_t)snprintf(out + at, size - at, "%s%" PRId64, d ? ", " : "", request_dim(tensor, d));
    if (at < size)
        snprintf(out + at, size - at, "]");
}

// Requests of two ranks that are being compared.
struct comparison {
    const struct request *one, *other;
    int one_rank, other_rank;
    struct bhvd_error *error;
};

// Horovod's error message, followed by the operation and the ranks.
__attribute__((format(printf, 2, 3))) static bhvd_status mismatch(const struct comparison *of, const char *format, ...)
{
    struct bhvd_error sentence;
    va_list args;
    va_start(args, format);
    error_vset(&sentence, BHVD_ERR_MISMATCH, format, args);
    va_end(args);
    const struct operation_key *key = &of->one->key;
    return error_set(of->error, BHVD_ERR_MISMATCH, "%.800s (%s '%.*s', ranks %d and %d)", sentence.message,
                     OPERATION_TRAITS[of->one->args.kind].word, key->name_size > 150 ? 150 : (int)key->name_size, key->name,
                     of->one_rank, of->other_rank);
}

static bhvd_status compare_shapes(const struct comparison *of)
{
    const struct request *one = of->one, *other = of->other;
    const char *kind = operation_kind_name(one->args.kind, one->args.op);
    bool first_dim_free = one->args.kind == BHVD_ALLGATHER || one->args.kind == BHVD_ALLTOALL;
    for (uint32_t t = 0; t < one->args.tensor_count; t++) {
        const struct request_tensor *a = &one->tensors[t], *b = &other->tensors[t];
        if (!first_dim_free) {
            if (a->ndim == b->ndim && memcmp(a->dims, b->dims, a->ndim * sizeof(int64_t)) == 0)
                continue;
            char a_shape[200], b_shape[200];
            request_format_shape(a_shape, sizeof a_shape, a);
            request_format_shape(b_shape, sizeof b_shape, b);
            return mismatch(of, "Mismatched %s tensor shapes: One rank sent a tensor of shape %s, but another rank sent a tensor "
                            "of shape %s.", kind, a_shape, b_shape);
        }
        if (a->ndim != b->ndim)
            return mismatch(of, "Mismatched %s tensor shapes: One rank sent a tensor of rank %d, but another rank sent a tensor of "
                            "rank %d.", kind, a->ndim, b->ndim);
        for (int d = 1; d < a->ndim; d++) {
            if (request_dim(a, d) != request_dim(b, d))
                return mismatch(of, "Mismatched %s tensor shapes: One rank sent a tensor with dimension %d equal to %" PRId64
                                ", but another rank sent a tensor with dimension %d equal to %" PRId64 ".",
                                kind, d, request_dim(a, d), d, request_dim(b, d));
        }
    }
    return BHVD_OK;
}

// NaN equals NaN here.
static bool differ(double a, double b) { return a != b && (a == a || b == b); }

bhvd_status request_compare(const struct request *one, int one_rank, const struct request *other, int other_rank,
                            struct bhvd_error *error)
{
    const struct comparison of = {one, other, one_rank, other_rank, error};
    const struct bhvd_args *a = &one->args, *b = &other->args;
    const char *kind = operation_kind_name(a->kind, a->op);
    for (size_t t = 0; t < a->tensor_count && t < b->tensor_count; t++) {
        if (one->tensors[t].dtype != other->tensors[t].dtype)
            return mismatch(&of, "Mismatched data types: One rank had type %s, but another rank had type %s.",
                            bhvd_dtype_name(one->tensors[t].dtype), bhvd_dtype_name(other->tensors[t].dtype));
    }
    if (a->kind != b->kind || (a->op == BHVD_OP_ADASUM) != (b->op == BHVD_OP_ADASUM))
        return mismatch(&of, "Mismatched operations: One rank did an %s, but another rank did an %s.", kind,
                        operation_kind_name(b->kind, b->op));
    if (a->tensor_count != b->tensor_count)
        return mismatch(&of, "Mismatched %s groups: One rank sent %zu tensors, but another rank sent %zu tensors.", kind,
                        a->tensor_count, b->tensor_count);
    bhvd_status status = compare_shapes(&of);
    if (status)
        return status;
    if (differ(a->prescale_factor, b->prescale_factor) || differ(a->postscale_factor, b->postscale_factor))
        return mismatch(&of, "Mismatched prescale and/or postscale factors: One rank sent factors (%g, %g), but another rank sent "
                        "factors (%g, %g).", a->prescale_factor, a->postscale_factor, b->prescale_factor, b->postscale_factor);
    if (a->op != b->op)
        return mismatch(&of, "Mismatched reduction operation: One rank sent reduction op %d, but another rank sent reduction op "
                        "%d.", a->op, b->op);
    if (a->codec != b->codec || differ(a->codec_options.parameter, b->codec_options.parameter) || a->exchange != b->exchange)
        return mismatch(&of, "Mismatched codecs: One rank sent codec %d with parameter %g and exchange %d, but another rank sent "
                        "codec %d with parameter %g and exchange %d.", a->codec, a->codec_options.parameter, a->exchange, b->codec,
                        b->codec_options.parameter, b->exchange);
    if (a->hierarchical != b->hierarchical)
        return mismatch(&of, "Mismatched %s levels: One rank asked for a hierarchical one, but another rank for a flat one.", kind);
    if (a->topology != b->topology || a->round != b->round)
        return mismatch(&of, "Mismatched %s rounds: One rank sent topology %d and round %d, but another rank sent topology %d and "
                        "round %d.", kind, a->topology, a->round, b->topology, b->round);
    if (a->kind == BHVD_PROCESS_SET_ADD &&
        (a->split_count != b->split_count || memcmp(one->splits, other->splits, a->split_count * sizeof(int64_t)) != 0))
        return error_set(error, BHVD_ERR_MISMATCH, "Mismatched process sets: ranks %d and %d tried to add different "
                         "ranks ('%.*s').", one_rank, other_rank, (int)one->key.name_size, one->key.name);
    if (root_of(one) != root_of(other))
        return mismatch(&of, "Mismatched %s root ranks: One rank specified root rank %d, but another rank specified root rank %d.",
                        kind, a->root_rank, b->root_rank);
    if (a->device != b->device)
        return mismatch(&of, "Mismatched %s CPU/GPU device selection: One rank specified device %s, but another rank specified "
                        "device %s.", kind, a->device >= 0 ? "GPU" : "CPU", b->device >= 0 ? "GPU" : "CPU");
    return BHVD_OK;
}
