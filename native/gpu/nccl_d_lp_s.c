// D_LP_S by NCCL (formulas: primitive/d_lp_s.c): the GPU encodes, exchanges with the neighbors, and adds to the replicas.
// Everything is put on the stream; codes and replicas are bit-equal to the CPU's.
#include "gpu/nccl_execution.h"
#include "gpu/staged_codes.h"

struct ring_execution {
    struct nccl_execution *x;
    const struct collective *coll;
    struct device_encoder encoder;
    struct code_layout layout;
    struct peers peers;
};

// values: receives the address of the values as one vector.
static int encode(struct ring_execution *r, void *codes, void **values)
{
    struct device_scratch *scratch = &r->x->scratch;
    int failed = staged_codes_pack(r->coll, scratch, values);
    void *encoded = *values;
    if (!failed && r->coll->mixes_before)
        failed = staged_codes_mix(r->coll, &r->encoder, scratch, &encoded);
    const struct encoding encoding = {.layout = &r->layout, .codes = codes, .values = encoded, .prescale = 1.0,
                                      .pass = ENCODER_VALUES};
    return failed ? failed : device_encoder_encode(&r->encoder, &encoding, scratch);
}

// Sends the own code to each peer, and receives theirs behind it.
static bhvd_status exchange(struct ring_execution *r, unsigned char *codes)
{
    struct nccl_execution *x = r->x;
    const size_t nbytes = r->layout.nbytes;
    if (!r->peers.count)
        return BHVD_OK;
    nccl_result inside = x->nccl->group_start();
    for (int p = 0; p < r->peers.count; p++) {
        const int peer = r->peers.index[p];
        nccl_execution_keep(&inside, x->nccl->send(codes, nbytes, NCCL_UINT8, peer, x->comm->handle, x->stream));
        nccl_execution_keep(&inside, x->nccl->recv(codes + (size_t)(1 + p) * nbytes, nbytes, NCCL_UINT8, peer, x->comm->handle,
                                                   x->stream));
    }
    return nccl_execution_group_end(x, inside);
}

bhvd_status nccl_d_lp_s(struct nccl_execution *x, const struct collective *coll)
{
    struct ring_execution r = {
        .x = x,
        .coll = coll,
        .encoder = device_encoder_init(&x->exec->kernels, coll, x->device, x->set->rank),
        .peers = peers_of(BHVD_TOPOLOGY_RING, x->set->size, x->set->rank, 0),
    };
    const size_t nbytes = collective_nbytes(coll);
    void *codes = NULL, *values = NULL;
    if (!nbytes)
        return BHVD_OK;
    r.layout = device_encoder_layout(&r.encoder, nbytes / r.encoder.host.element, 1);
    int failed = device_scratch_acquire(&x->scratch, (size_t)(1 + r.peers.count) * r.layout.nbytes, &codes);
    if (!failed)
        failed = encode(&r, codes, &values);
    bhvd_status status = nccl_execution_checked(x, failed);
    if (!status)
        status = exchange(&r, codes);
    failed = status ? 0 : staged_codes_add(coll, &r.encoder, &r.layout, &r.peers, codes, x->stream);
    if (!status && !failed && coll->mixes_after)
        failed = staged_codes_mix_results(coll, &r.encoder, &x->scratch, values);
    return status ? status : nccl_execution_checked(x, failed);
}
