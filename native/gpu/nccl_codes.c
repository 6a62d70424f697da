// C_LP_S and D_LP_S by NCCL (formulas: primitive/c_lp_s.c, d_lp_s.c): the GPU encodes and exchanges; then it averages, encodes
// again and decodes, or it adds to the replicas. Everything is put on the stream; codes, results, residuals and replicas are
// bit-equal to the CPU's.
#include <stdlib.h>

#include "gpu/device_copy.h"
#include "gpu/nccl_execution.h"
#include "gpu/staged_codes.h"

struct coded_execution {
    struct nccl_execution *x;
    const struct collective *coll;
    struct device_encoder encoder;
    struct code_layout layout;
    struct device_buffer *worker_residual, *server_residual;  // the new ones; NULL: no error feedback
};

static struct coded_execution coded_execution(struct nccl_execution *x, const struct collective *coll, int chunks)
{
    struct coded_execution c = {
        .x = x,
        .coll = coll,
        .encoder = device_encoder_init(&x->exec->kernels, coll, x->device, x->set->rank),
    };
    c.layout = device_encoder_layout(&c.encoder, collective_nbytes(coll) / c.encoder.host.element, chunks);
    return c;
}

// One code for each rank of the set is sent, or received: nbytes[i] bytes at distance `stride`; stride 0: the same code for all. A
// rank with 0 bytes takes no part in that direction.
struct codes {
    unsigned char *at;
    size_t stride;
    const size_t *nbytes;               // by rank
};

static bhvd_status exchange(struct nccl_execution *x, const struct codes *out, const struct codes *in)
{
    nccl_result inside = x->nccl->group_start();
    for (int i = 0; i < x->set->size; i++)
        nccl_execution_exchange(x, &inside, i, out->at + (size_t)i * out->stride, out->nbytes[i], in->at + (size_t)i * in->stride,
                                in->nbytes[i]);
    return nccl_execution_group_end(x, inside);
}

static int encode_values(struct coded_execution *c, void *codes)
{
    void *values = NULL;
    int failed = staged_codes_pack(c->coll, &c->x->scratch, &values);
    struct encoding encoding = {.layout = &c->layout, .codes = codes, .values = values,
                                .prescale = c->coll->args.prescale_factor, .pass = ENCODER_VALUES};
    return failed ?: staged_codes_encode(&c->encoder, &encoding, c->coll->args.worker_copy, &c->worker_residual, &c->x->scratch);
}

// Encodes the mean of the own chunk over all ranks' codes.
static int encode_mean(struct coded_execution *c, const struct segment_part *own, void *code_of_mean, const void *codes)
{
    const int n = c->x->set->size;
    const double factor = collective_sum_factor(c->coll, n);
    const struct code_layout layout = device_encoder_layout(&c->encoder, own->count, 1);
    struct encoding encoding = {.layout = &layout, .codes = code_of_mean, .prescale = 1.0, .pass = ENCODER_MEAN,
                                .begin = own->begin};
    void *mean;
    if (device_encoder_reencodes(&c->encoder) && !c->coll->args.server_copy)
        return device_encoder_reencode(&c->encoder, &encoding, codes, c->layout.chunk_stride, (uint64_t)n, factor, c->x->stream);
    int failed = device_scratch_acquire(&c->x->scratch, own->count * c->encoder.host.element, &mean);
    if (!failed)
        failed = device_encoder_mean(&c->encoder, &layout, mean, codes, c->layout.chunk_stride, (uint64_t)n, factor, c->x->stream);
    encoding.values = mean;
    return failed ?: staged_codes_encode(&c->encoder, &encoding, c->coll->args.server_copy, &c->server_residual, &c->x->scratch);
}

// Bytes of every chunk's codes; bytes of the own chunk's codes, repeated for every rank.
static bhvd_status scatter_gather(struct coded_execution *c, void *values, size_t *of_chunk, size_t *of_own)
{
    struct nccl_execution *x = c->x;
    const int n = x->set->size, me = x->set->rank;
    const size_t stride = c->layout.chunk_stride;
    const struct segment_part own = segments_chunk(&c->layout.cut, (uint64_t)me);
    void *sent = NULL, *received = NULL, *means = NULL;
    for (int i = 0; i < n; i++) {
        of_chunk[i] = segments_chunk(&c->layout.cut, (uint64_t)i).count ? stride : 0;
        of_own[i] = own.count ? stride : 0;
    }
    int failed = device_scratch_acquire(&c->x->scratch, c->layout.nbytes, &sent);
    failed = failed ?: device_scratch_acquire(&c->x->scratch, c->layout.nbytes, &received);
    failed = failed ?: device_scratch_acquire(&c->x->scratch, c->layout.nbytes, &means);
    failed = failed ?: encode_values(c, sent);
    bhvd_status status = nccl_execution_checked(x, failed);
    status = status ?: exchange(x, &(struct codes){sent, stride, of_chunk}, &(struct codes){received, stride, of_own});
    unsigned char *mean = (unsigned char *)means + (size_t)me * stride;
    if (!status && own.count)
        status = nccl_execution_checked(x, encode_mean(c, &own, mean, received));
    of_own[me] = of_chunk[me] = 0;      // already in place
    status = status ?: exchange(x, &(struct codes){mean, 0, of_own}, &(struct codes){means, stride, of_chunk});
    return status ?: nccl_execution_checked(x, device_encoder_decode(&c->encoder, &c->layout, values, means, x->stream));
}

static bhvd_status allgather(struct coded_execution *c, void *values)
{
    struct nccl_execution *x = c->x;
    const size_t stride = c->layout.nbytes;
    void *codes = NULL;
    int failed = device_scratch_acquire(&c->x->scratch, stride * (size_t)x->set->size, &codes);
    unsigned char *mine = (unsigned char *)codes + (size_t)x->set->rank * stride;
    failed = failed ?: encode_values(c, mine);
    bhvd_status status = nccl_execution_checked(x, failed);
    status = status ?: nccl_execution_enqueued(x, x->nccl->all_gather(mine, codes, stride, NCCL_UINT8, x->comm->handle, x->stream));
    return status ? status
                  : nccl_execution_checked(x, device_encoder_mean(&c->encoder, &c->layout, values, codes, stride,
                                                                  (uint64_t)x->set->size,
                                                                  collective_sum_factor(c->coll, x->set->size), x->stream));
}

// Copies the results that belong in the host's memory.
static bhvd_status copy_to_host(struct nccl_execution *x, struct collective *coll, const unsigned char *values)
{
    bhvd_status status = BHVD_OK;
    for (size_t t = 0; t < coll->args.tensor_count && !status; t++) {
        struct tensor *tensor = &coll->tensors[t];
        const struct staged_tensor *staged = &coll->staging->tensors[t];
        if (tensor->nbytes && (!staged->dst || staged->dst_on_host)) {
            if (executor_allocate_result(x->exec, tensor, tensor->dim0))
                return x->exec->failure.status;
            x->host_waits = true;
            status = nccl_execution_copy(x, staged->dst ? staged->dst : tensor->dst, values, tensor->nbytes);
        }
        values += tensor->nbytes;
    }
    return status;
}

// The new residuals replace the old ones once the operation has been enqueued.
static void keep(struct coded_execution *c, struct bhvd_device_array *device_copy, struct device_buffer *residual,
                 bhvd_status status)
{
    if (residual && !status)
        device_copy_adopt(device_copy, c->x->device, residual);
    else
        device_buffer_release(c->x->device, residual);
}

bhvd_status nccl_c_lp_s(struct nccl_execution *x, struct collective *coll)
{
    const bool scatters = coll->args.exchange == BHVD_EXCHANGE_SCATTER_GATHER;
    const size_t n = (size_t)x->set->size;
    struct coded_execution c = coded_execution(x, coll, scatters ? x->set->size : 1);
    if (!c.layout.nbytes)
        return BHVD_OK;
    size_t *sizes = calloc(2 * n, sizeof *sizes);
    void *values = NULL;
    bhvd_status status = sizes ? BHVD_OK : executor_fail(x->exec, BHVD_ERR_SYSTEM, "no memory for a collective of %zu ranks", n);
    status = status ?: nccl_execution_checked(x, staged_codes_target(coll, &x->scratch, &values));
    if (!status)
        status = scatters ? scatter_gather(&c, values, sizes, sizes + n) : allgather(&c, values);
    status = status ?: nccl_execution_checked(x, staged_codes_unpack(coll, &x->scratch, values));
    status = status ?: copy_to_host(x, coll, values);
    keep(&c, coll->args.worker_copy, c.worker_residual, status);
    keep(&c, coll->args.server_copy, c.server_residual, status);
    free(sizes);
    return status;
}

// ------------------------------------------------------------------------------------------------------------- D_LP_S

// values: receives the address of the values as one vector.
static int encode_mixed(struct coded_execution *c, void *codes, void **values)
{
    struct device_scratch *scratch = &c->x->scratch;
    int failed = staged_codes_pack(c->coll, scratch, values);
    void *encoded = *values;
    failed = failed ?: staged_codes_mix(c->coll, &c->encoder, scratch, &encoded);
    const struct encoding encoding = {.layout = &c->layout, .codes = codes, .values = encoded, .prescale = 1.0,
                                      .pass = ENCODER_VALUES};
    return failed ?: device_encoder_encode(&c->encoder, &encoding, scratch);
}

bhvd_status nccl_d_lp_s(struct nccl_execution *x, struct collective *coll)
{
    const struct peers peers = peers_of(BHVD_TOPOLOGY_RING, x->set->size, x->set->rank, 0);
    struct coded_execution c = coded_execution(x, coll, 1);
    const size_t nbytes = c.layout.nbytes;
    void *codes = NULL, *values = NULL;
    if (!nbytes)
        return BHVD_OK;
    int failed = device_scratch_acquire(&x->scratch, (size_t)(1 + peers.count) * nbytes, &codes);
    failed = failed ?: encode_mixed(&c, codes, &values);
    bhvd_status status = nccl_execution_checked(x, failed);
    if (!status && peers.count) {
        nccl_result inside = x->nccl->group_start();
        for (int p = 0; p < peers.count; p++)       // their codes follow the own one
            nccl_execution_exchange(x, &inside, peers.index[p], codes, nbytes, (unsigned char *)codes + (size_t)(1 + p) * nbytes,
                                    nbytes);
        status = nccl_execution_group_end(x, inside);
    }
    failed = status ? 0 : staged_codes_add(coll, &c.encoder, &c.layout, &peers, codes, x->stream);
    if (!status && !failed)
        failed = staged_codes_mix_results(coll, &c.encoder, &x->scratch, values);
    return status ?: nccl_execution_checked(x, failed);
}
