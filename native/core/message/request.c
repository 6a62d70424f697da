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

// Reads everything before the tensors. False: malformed.
static bool take_fields(struct bytes_reader *r, struct request *fields)
{
    fields->key = operation_key_take(r, bytes_take_u32(r));
    fields->kind = bytes_take_u8(r);
    fields->op = bytes_take_u8(r);
    fields->codec = bytes_take_u8(r);
    fields->codec_parameter = bytes_take_f64(r);
    fields->exchange = bytes_take_u8(r);
    fields->topology = bytes_take_u8(r);
    fields->round = bytes_take_i64(r);
    fields->hierarchical = bytes_take_u8(r) != 0;
    fields->on_gpu = bytes_take_u8(r) != 0;
    fields->root_rank = bytes_take_i64(r);
    fields->prescale_factor = bytes_take_f64(r);
    fields->postscale_factor = bytes_take_f64(r);
    fields->tensor_count = bytes_take_u32(r);
    return !r->failed && (int)fields->kind < OPERATION_KINDS && fields->op <= BHVD_OP_PRODUCT &&
           fields->codec < BHVD_CODEC_COUNT && fields->exchange <= BHVD_EXCHANGE_ALLGATHER &&
           fields->topology <= BHVD_TOPOLOGY_ROUND_ROBIN &&
           OPERATION_TRAITS[fields->kind].has_tensors == (fields->tensor_count > 0);
}

static bool take_tensors(struct bytes_reader *r, struct request *request)
{
    for (uint32_t t = 0; t < request->tensor_count; t++) {
        struct request_tensor *tensor = &request->tensors[t];
        tensor->dtype = bytes_take_u8(r);
        tensor->ndim = bytes_take_u8(r);
        tensor->dims = bytes_take(r, tensor->ndim * sizeof(int64_t));
        if (r->failed || tensor->dtype >= BHVD_DTYPE_COUNT || !shape_is_possible(tensor))
            return false;
    }
    request->split_count = bytes_take_u32(r);
    request->splits = bytes_take(r, request->split_count * sizeof(int64_t));
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
    const bool is_possible = take_fields(&r, &fields) && fields.tensor_count <= size / 2;
    struct request *request = is_possible ? malloc(sizeof *request + fields.tensor_count * sizeof request->tensors[0]) : NULL;
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
    return request->root_rank == 2 && (request->kind == BHVD_ALLTOALL || request->kind == BHVD_PROCESS_SET_ADD);
}

// As in requests that are not speculative.
static int64_t root_of(const struct request *request)
{
    return request_is_speculative(request) ? request->kind == BHVD_PROCESS_SET_ADD : request->root_rank;
}

bool request_is_of_members(const struct request *request)
{
    return request->kind == BHVD_PROCESS_SET_ADD && request->root_rank != 0;
}

bool request_lists(const struct request *request, int rank)
{
    for (uint32_t i = 0; i < request->split_count; i++) {
        if (request_split(request, i) == rank)
            return true;
    }
    return false;
}

size_t request_nbytes(const struct request *request)
{
    size_t nbytes = 0;
    for (uint32_t t = 0; t < request->tensor_count; t++) {
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
                     OPERATION_TRAITS[of->one->kind].word, key->name_size > 150 ? 150 : (int)key->name_size, key->name,
                     of->one_rank, of->other_rank);
}

static bhvd_status compare_shapes(const struct comparison *of)
{
    const struct request *one = of->one, *other = of->other;
    const char *kind = operation_kind_name(one->kind, one->op);
    bool first_dim_free = one->kind == BHVD_ALLGATHER || one->kind == BHVD_ALLTOALL;
    for (uint32_t t = 0; t < one->tensor_count; t++) {
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
    const char *kind = operation_kind_name(one->kind, one->op);
    uint32_t common = one->tensor_count < other->tensor_count ? one->tensor_count : other->tensor_count;
    for (uint32_t t = 0; t < common; t++) {
        if (one->tensors[t].dtype != other->tensors[t].dtype)
            return mismatch(&of, "Mismatched data types: One rank had type %s, but another rank had type %s.",
                            bhvd_dtype_name(one->tensors[t].dtype), bhvd_dtype_name(other->tensors[t].dtype));
    }
    if (one->kind != other->kind || (one->op == BHVD_OP_ADASUM) != (other->op == BHVD_OP_ADASUM))
        return mismatch(&of, "Mismatched operations: One rank did an %s, but another rank did an %s.", kind,
                        operation_kind_name(other->kind, other->op));
    if (one->tensor_count != other->tensor_count)
        return mismatch(&of, "Mismatched %s groups: One rank sent %u tensors, but another rank sent %u tensors.", kind,
                        one->tensor_count, other->tensor_count);
    bhvd_status status = compare_shapes(&of);
    if (status)
        return status;
    if (differ(one->prescale_factor, other->prescale_factor) || differ(one->postscale_factor, other->postscale_factor))
        return mismatch(&of, "Mismatched prescale and/or postscale factors: One rank sent factors (%g, %g), but another rank sent "
                        "factors (%g, %g).", one->prescale_factor, one->postscale_factor, other->prescale_factor,
                        other->postscale_factor);
    if (one->op != other->op)
        return mismatch(&of, "Mismatched reduction operation: One rank sent reduction op %d, but another rank sent reduction op "
                        "%d.", one->op, other->op);
    if (one->codec != other->codec || differ(one->codec_parameter, other->codec_parameter) || one->exchange != other->exchange)
        return mismatch(&of, "Mismatched codecs: One rank sent codec %d with parameter %g and exchange %d, but another rank sent "
                        "codec %d with parameter %g and exchange %d.", one->codec, one->codec_parameter, one->exchange,
                        other->codec, other->codec_parameter, other->exchange);
    if (one->hierarchical != other->hierarchical)
        return mismatch(&of, "Mismatched %s levels: One rank asked for a hierarchical one, but another rank for a flat one.", kind);
    if (one->topology != other->topology || one->round != other->round)
        return mismatch(&of, "Mismatched %s rounds: One rank sent topology %d and round %" PRId64
                        ", but another rank sent topology %d and round %" PRId64 ".",
                        kind, one->topology, one->round, other->topology, other->round);
    if (one->kind == BHVD_PROCESS_SET_ADD &&
        (one->split_count != other->split_count ||
         memcmp(one->splits, other->splits, one->split_count * sizeof(int64_t)) != 0))
        return error_set(error, BHVD_ERR_MISMATCH, "Mismatched process sets: ranks %d and %d tried to add different "
                         "ranks ('%.*s').", one_rank, other_rank, (int)one->key.name_size, one->key.name);
    if (root_of(one) != root_of(other))
        return mismatch(&of, "Mismatched %s root ranks: One rank specified root rank %" PRId64
                        ", but another rank specified root rank %" PRId64 ".", kind, one->root_rank, other->root_rank);
    if (one->on_gpu != other->on_gpu)
        return mismatch(&of, "Mismatched %s CPU/GPU device selection: One rank specified device %s, but another rank specified "
                        "device %s.", kind, one->on_gpu ? "GPU" : "CPU", other->on_gpu ? "GPU" : "CPU");
    return BHVD_OK;
}
