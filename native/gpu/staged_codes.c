#include "gpu/staged_codes.h"

#include <stdlib.h>

#include "base/status.h"
#include "gpu/device_copy.h"
#include "gpu/staging.h"

bool staged_codes_apply(const struct collective *coll, bool is_hierarchical)
{
    const struct bhvd_args *args = &coll->args;
    bool takes = (args->kind == BHVD_C_LP_S || args->kind == BHVD_D_LP_S) && args->gpu && !is_hierarchical &&
                 collective_nbytes(coll) && device_encoder_has(args->gpu, args->codec, coll->tensors[0].dtype);
    for (size_t t = 0; t < args->tensor_count && takes && args->kind == BHVD_C_LP_S; t++)
        takes = !coll->tensors[t].nbytes || (args->tensors[t].dst && !args->tensors[t].dst_on_host);
    return takes;
}

// ---------------------------------------------------------------------------------------------------------- vectors

static bool is_on_device(const struct staged_tensor *staged) { return staged->dst && !staged->dst_on_host; }

// The only tensor with data, which then is the whole vector, or NULL.
static const struct staged_tensor *only_tensor(const struct collective *coll)
{
    const struct staged_tensor *only = NULL;
    for (size_t t = 0; t < coll->args.tensor_count; t++) {
        if (coll->tensors[t].nbytes && only)
            return NULL;
        if (coll->tensors[t].nbytes)
            only = &coll->staging->tensors[t];
    }
    return only;
}

static int copy_all(const struct collective *coll, unsigned char *vector, bool packs, struct device_scratch *scratch)
{
    struct device_copies copies;
    int failed = device_copies_begin(&copies, scratch, coll->args.tensor_count);
    for (size_t t = 0; t < coll->args.tensor_count && !failed; t++) {
        const struct staged_tensor *staged = &coll->staging->tensors[t];
        const size_t nbytes = coll->tensors[t].nbytes;
        if (packs)
            failed = device_copies_add(&copies, vector, staged->src, nbytes);
        else if (is_on_device(staged))
            failed = device_copies_add(&copies, staged->dst, vector, nbytes);
        vector += nbytes;
    }
    return device_copies_end(&copies, failed);
}

int staged_codes_pack(const struct collective *coll, struct device_scratch *scratch, void **out)
{
    const struct staged_tensor *only = only_tensor(coll);
    if (only) {
        *out = (void *)(uintptr_t)only->src;
        return 0;
    }
    int failed = device_scratch_acquire(scratch, collective_nbytes(coll), out);
    return failed ?: copy_all(coll, *out, true, scratch);
}

int staged_codes_target(const struct collective *coll, struct device_scratch *scratch, void **out)
{
    const struct staged_tensor *only = only_tensor(coll);
    if (!only || !is_on_device(only))
        return device_scratch_acquire(scratch, collective_nbytes(coll), out);
    *out = only->dst;
    return 0;
}

int staged_codes_unpack(const struct collective *coll, struct device_scratch *scratch, void *vector)
{
    const struct staged_tensor *only = only_tensor(coll);
    return only && is_on_device(only) ? 0 : copy_all(coll, vector, false, scratch);
}

// ------------------------------------------------------------------------------------------------- posted and ended

// Also keeps the elements beyond the vector: a device copy has the size of the longest chunk's residuals.
static int keep_rest(const struct encoding *encoding, const struct bhvd_device_array *device_copy, struct device_scratch *scratch)
{
    const size_t count = encoding->layout->cut.count;
    if (device_copy->count <= count)
        return 0;
    return scratch->device->ops->copy(scratch->device, encoding->new_residual + count, encoding->residual + count,
                                      (device_copy->count - count) * sizeof(float), scratch->stream);
}

int staged_codes_encode(const struct device_encoder *encoder, struct encoding *encoding, struct bhvd_device_array *device_copy,
                        struct device_buffer **residual, struct device_scratch *scratch)
{
    struct bhvd_device *device = scratch->device;
    if (!device_copy)
        return device_encoder_encode(encoder, encoding, scratch);
    float *old;
    int failed = device_copy_use(device_copy, device, scratch->stream, &old);
    failed = failed ?: device_buffer_acquire(device, MEMORY_DEVICE, device_copy->count * sizeof(float), residual);
    if (failed)
        return failed;
    encoding->residual = old;
    encoding->new_residual = (float *)(void *)(*residual)->data;
    failed = device_encoder_encode(encoder, encoding, scratch);
    failed = failed ?: keep_rest(encoding, device_copy, scratch);
    failed = failed ?: device_copy_use_end(device_copy, scratch->stream);
    const int recorded = device_buffer_record(device, *residual, scratch->stream);
    return failed ?: recorded;
}

static int encode(struct collective *coll, struct device_scratch *scratch, const void *values)
{
    struct staging *staging = coll->staging;
    struct staged_codes *codes = staging->codes;
    struct bhvd_device *device = staging->device;
    struct encoding encoding = {.layout = &codes->layout, .values = values, .prescale = coll->args.prescale_factor,
                                .pass = ENCODER_VALUES};
    int failed = 0;
    if (coll->args.kind == BHVD_D_LP_S) {
        failed = device_buffer_acquire(device, MEMORY_DEVICE, codes->layout.nbytes + codes->results_nbytes, &codes->on_device);
        if (!failed)
            encoding.codes = codes->on_device->data;
    } else {
        failed = device_scratch_acquire(scratch, codes->layout.nbytes, &encoding.codes);
    }
    failed = failed ?: staged_codes_encode(&codes->encoder, &encoding, coll->args.worker_copy, &codes->residual, scratch);
    failed = failed ?: device->ops->copy(device, codes->pinned.own, encoding.codes, codes->layout.nbytes, scratch->stream);
    const int recorded = codes->on_device ? device_buffer_record(device, codes->on_device, scratch->stream) : 0;
    return failed ?: recorded;
}

static int mix(const struct collective *coll, const struct device_encoder *encoder, void *dst, const void *values,
               const double *weights, void *stream)
{
    float *replicas[REPLICAS] = {0};
    int failed = 0;
    for (int r = 0; r < REPLICAS && !failed; r++)
        failed = weights[1 + r] != 0 ? device_copy_use(coll->args.replica_copies[r], encoder->device, stream, &replicas[r]) : 0;
    failed = failed ?: device_encoder_mix(encoder, dst, values, replicas, weights, collective_nbytes(coll) / encoder->host.element,
                                        stream);
    for (int r = 0; r < REPLICAS && !failed; r++)
        failed = replicas[r] ? device_copy_use_end(coll->args.replica_copies[r], stream) : 0;
    return failed;
}

int staged_codes_mix(const struct collective *coll, const struct device_encoder *encoder, struct device_scratch *scratch,
                     void **values)
{
    void *mixed;
    if (!collective_mixes(coll->args.before))
        return 0;
    const double weights[] = {1, coll->args.before[0], coll->args.before[1], coll->args.before[2]};
    int failed = device_scratch_acquire(scratch, collective_nbytes(coll), &mixed);
    failed = failed ?: mix(coll, encoder, mixed, *values, weights, scratch->stream);
    *values = mixed;
    return failed;
}

int staged_codes_mix_results(const struct collective *coll, const struct device_encoder *encoder, struct device_scratch *scratch,
                             const void *values)
{
    void *results;
    if (!collective_mixes(coll->args.after + 1))
        return 0;
    int failed = staged_codes_target(coll, scratch, &results);
    failed = failed ?: mix(coll, encoder, results, values, coll->args.after, scratch->stream);
    return failed ?: staged_codes_unpack(coll, scratch, results);
}

static int start(struct collective *coll, void *stream)
{
    struct staging *staging = coll->staging;
    struct bhvd_device *device = staging->device;
    struct device_scratch scratch = {device, device->to_host, NULL};
    void *values = NULL;
    int failed = device->ops->event_record(device, staging->buffer->ready, stream);
    failed = failed ?: device->ops->stream_wait_event(device, device->to_host, staging->buffer->ready);
    failed = failed ?: staged_codes_pack(coll, &scratch, &values);
    failed = failed ?: staged_codes_mix(coll, &staging->codes->encoder, &scratch, &values);
    failed = failed ?: encode(coll, &scratch, values);
    failed = device_scratch_release(&scratch, failed);
    failed = failed ?: device->ops->event_record(device, staging->buffer->ready, device->to_host);
    if (!failed)
        staging->buffer->last = staging->buffer->ready;
    return failed;
}

bhvd_status staged_codes_create(struct collective *coll, const struct kernel_table *kernels, int set_size, int rank,
                                struct bhvd_error *error)
{
    const struct bhvd_args *args = &coll->args;
    const bool in_ring = args->kind == BHVD_D_LP_S, scatters = !in_ring && args->exchange == BHVD_EXCHANGE_SCATTER_GATHER;
    struct staged_codes *codes = calloc(1, sizeof *codes);
    if (!codes)
        return error_set(error, BHVD_ERR_SYSTEM, "no memory for operation '%s'", args->name);
    codes->encoder = device_encoder_init(kernels, coll, args->gpu, rank);
    codes->ranks = set_size;
    codes->layout = device_encoder_layout(&codes->encoder, collective_nbytes(coll) / codes->encoder.host.element,
                                          scatters ? set_size : 1);
    codes->peers = peers_of(BHVD_TOPOLOGY_RING, set_size, rank, 0);
    codes->results_nbytes = codes->layout.nbytes * (size_t)(in_ring ? codes->peers.count : scatters ? 1 : set_size);
    const size_t own_nbytes = in_ring || scatters ? codes->layout.nbytes : 0;
    unsigned char *memory;
    bhvd_status status = staging_open(coll, own_nbytes + codes->results_nbytes, &memory, error);
    if (status) {
        free(codes);
        return status;
    }
    coll->staging->codes = codes;
    codes->pinned = (struct gpu_codes){
        .own = own_nbytes ? memory : memory + (size_t)rank * codes->layout.nbytes,
        .results = memory + own_nbytes,
        .each = codes->layout.chunk_stride,
        .segment = codes->layout.segment_stride,
    };
    int failed = start(coll, args->stream);
    return failed ? device_failed(args->gpu, failed, "the tensors cannot be encoded", error) : BHVD_OK;
}

// The new residuals replace the old ones.
static void update_residual(struct collective *coll)
{
    struct staged_codes *codes = coll->staging->codes;
    if (codes->residual)
        device_copy_adopt(coll->args.worker_copy, coll->staging->device, codes->residual);
    codes->residual = NULL;
}

// C_LP_S: decodes the result from its codes.
static int decode(const struct collective *coll, struct device_scratch *scratch)
{
    const struct staged_codes *codes = coll->staging->codes;
    struct bhvd_device *device = coll->staging->device;
    void *on_device = NULL, *values = NULL;
    int failed = device_scratch_acquire(scratch, codes->results_nbytes, &on_device);
    failed = failed ?: device->ops->copy(device, on_device, codes->pinned.results, codes->results_nbytes, scratch->stream);
    failed = failed ?: staged_codes_target(coll, scratch, &values);
    if (!failed && coll->args.exchange == BHVD_EXCHANGE_SCATTER_GATHER)
        failed = device_encoder_decode(&codes->encoder, &codes->layout, values, on_device, scratch->stream);
    else if (!failed)
        failed = device_encoder_mean(&codes->encoder, &codes->layout, values, on_device, codes->layout.nbytes,
                                   (uint64_t)codes->ranks, collective_sum_factor(coll, codes->ranks), scratch->stream);
    return failed ?: staged_codes_unpack(coll, scratch, values);
}

int staged_codes_add(const struct collective *coll, const struct device_encoder *encoder, const struct code_layout *layout,
                     const struct peers *peers, const unsigned char *on_device, void *stream)
{
    const int code_of[REPLICAS] = {0, peers->count ? 1 : 0, peers->count};
    int failed = 0;
    for (int r = 0; r < REPLICAS && !failed; r++) {
        float *replica;
        if (!coll->args.replicas[r])
            continue;
        failed = device_copy_use(coll->args.replica_copies[r], encoder->device, stream, &replica);
        failed = failed ?: device_encoder_add(encoder, layout, replica, on_device + (size_t)code_of[r] * layout->nbytes, stream);
        failed = failed ?: device_copy_use_end(coll->args.replica_copies[r], stream);
    }
    return failed;
}

// D_LP_S: copies the peers' codes behind the own ones, and adds all to the replicas.
static int add(const struct collective *coll, struct device_scratch *scratch)
{
    void *stream = scratch->stream, *values = NULL;
    const struct staged_codes *codes = coll->staging->codes;
    struct bhvd_device *device = coll->staging->device;
    unsigned char *on_device = codes->on_device->data;
    int failed = 0;
    if (codes->results_nbytes)
        failed = device->ops->copy(device, on_device + codes->layout.nbytes, codes->pinned.results, codes->results_nbytes, stream);
    failed = failed ?: staged_codes_add(coll, &codes->encoder, &codes->layout, &codes->peers, on_device, stream);
    if (!failed && collective_mixes(coll->args.after + 1))
        failed = staged_codes_pack(coll, scratch, &values);
    failed = failed ?: staged_codes_mix_results(coll, &codes->encoder, scratch, values);
    const int recorded = device_buffer_record(device, codes->on_device, stream);
    return failed ?: recorded;
}

bhvd_status staged_codes_end(struct collective *coll, struct bhvd_error *error)
{
    struct staging *staging = coll->staging;
    struct bhvd_device *device = staging->device;
    struct device_scratch scratch = {device, device->from_host, NULL};
    int failed = coll->args.kind == BHVD_D_LP_S ? add(coll, &scratch) : decode(coll, &scratch);
    failed = device_scratch_release(&scratch, failed);
    failed = failed ?: device_buffer_record(device, staging->buffer, scratch.stream);
    if (failed)
        return device_failed(device, failed, "the result cannot be decoded", error);
    update_residual(coll);
    return BHVD_OK;
}

void staged_codes_destroy(struct collective *coll)
{
    struct staged_codes *codes = coll->staging ? coll->staging->codes : NULL;
    if (!codes)
        return;
    device_buffer_release(coll->staging->device, codes->residual);
    device_buffer_release(coll->staging->device, codes->on_device);
    free(codes);
    coll->staging->codes = NULL;
}
