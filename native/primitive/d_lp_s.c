// D_LP_S: decentralized, low precision, synchronous. Ranks stand in a ring, and each keeps replicas of what it and its
// neighbours have sent so far:
//
//     own += D(Q(v_i))      left += D(Q(v_{i-1}))      right += D(Q(v_{i+1}))
//
// All three holders of a replica decode the same bytes and add them in float32, so replicas that began equal stay
// bit-equal: own of i, right of i-1, left of i+1. What Q loses is in v_i next time, when v is a difference to a replica:
// DCD-PSGD and CHOCO-SGD are this primitive and a formula. n = 2: left and right are the same rank, whose code is sent
// once and added to both; n = 1: own only.
//
// v is encoded in segments (encoder.h): a few are on the wire while another is encoded or decoded.
// Wire: |Q(N)| bytes to each neighbour: 2 |Q(N)| per rank (n = 2: |Q(N)|).
#include "primitive/primitive.h"

#include "core/progress.h"
#include "primitive/encoder.h"
#include "primitive/peers.h"

enum { WINDOW = 3 };            // segments in flight

struct slot {
    unsigned char *mine, *received[PEERS_MAX];
    struct transfer transfers[2 * PEERS_MAX];
};

struct exchange {
    bhvd_context *ctx;
    const struct span_list *list;
    struct encoder encoder;
    struct peers peers;
    struct link *links[PEERS_MAX];
    size_t count;
    float *own, *left, *right;  // NULL: not kept
    struct slot slots[WINDOW];
};

static size_t segment_count(const struct exchange *x, size_t s)
{
    size_t left = x->count - s * ENCODER_SEGMENT;
    return left < ENCODER_SEGMENT ? left : ENCODER_SEGMENT;
}

static void send(struct exchange *x, size_t s)
{
    struct slot *slot = &x->slots[s % WINDOW];
    const size_t count = segment_count(x, s), begin = s * ENCODER_SEGMENT, element = x->encoder.element;
    const void *value = span_source(x->list, begin * element, count * element, x->encoder.value);
    encoder_encode(&x->encoder, slot->mine, value, count, NULL, ENCODER_VALUES, begin);
    const size_t nbytes = encoder_size(&x->encoder, count);
    for (int p = 0; p < x->peers.count; p++) {
        link_post_send(x->links[p], &slot->transfers[2 * p], slot->mine, nbytes);
        link_post_recv(x->links[p], &slot->transfers[2 * p + 1], slot->received[p], nbytes);
    }
    progress_look(x->ctx);
}

static void add(const struct exchange *x, float *replica, const unsigned char *code, size_t s)
{
    if (replica)
        x->encoder.codec->decode_add(replica + s * ENCODER_SEGMENT, code, segment_count(x, s), &x->encoder.options);
}

static bhvd_status receive(struct exchange *x, size_t s)
{
    struct slot *slot = &x->slots[s % WINDOW];
    add(x, x->own, slot->mine, s);
    bhvd_status status = progress_transfers(x->ctx, slot->transfers, 2 * x->peers.count);
    if (!status && x->peers.count) {
        add(x, x->left, slot->received[0], s);
        add(x, x->right, slot->received[x->peers.count - 1], s);
    }
    return status;
}

static bhvd_status exchange_run(struct exchange *x, const struct bhvd_handle *op, int rank)
{
    const size_t segments = (x->count + ENCODER_SEGMENT - 1) / ENCODER_SEGMENT, longest = segment_count(x, 0);
    x->encoder = encoder_init(x->ctx, op, rank);
    const size_t stride = encoder_stride(&x->encoder, longest);
    unsigned char *scratch = fusion_acquire(
        x->ctx, 1, WINDOW * (1 + PEERS_MAX) * stride + encoder_scratch_size(&x->encoder, longest));
    if (!scratch)
        return context_fail(x->ctx, BHVD_ERR_SYSTEM, "no memory for codes of %zu elements", longest);
    for (int i = 0; i < WINDOW; i++) {
        x->slots[i].mine = scratch;
        for (int p = 0; p < PEERS_MAX; p++)
            x->slots[i].received[p] = scratch + (size_t)(1 + p) * stride;
        scratch += (1 + PEERS_MAX) * stride;
    }
    encoder_set_scratch(&x->encoder, scratch, longest);
    bhvd_status status = BHVD_OK;
    for (size_t s = 0; s < segments + WINDOW - 1 && !status; s++) {
        if (s < segments)
            send(x, s);
        if (s >= WINDOW - 1)
            status = receive(x, s - (WINDOW - 1));
    }
    return status;
}

bhvd_status d_lp_s(bhvd_context *ctx, struct process_set *set, struct bhvd_handle *op)
{
    struct span_list list = {0};
    bhvd_status status = BHVD_OK;
    for (size_t t = 0; t < op->tensor_count && !status; t++) {
        if (!span_list_add(&list, &op->tensors[t]))
            status = context_fail(ctx, BHVD_ERR_SYSTEM, "no memory for an operation of %zu tensors", op->tensor_count);
    }
    struct exchange x = {
        .ctx = ctx,
        .list = &list,
        .peers = peers_of(BHVD_TOPOLOGY_RING, set->size, set->rank, 0),
        .count = list.nbytes / bhvd_dtype_size(op->tensors[0].dtype),
        .own = op->replicas[0],
        .left = op->replicas[1],
        .right = op->replicas[2],
    };
    for (int p = 0; p < x.peers.count; p++)
        x.links[p] = collective_link(ctx, set, x.peers.index[p]);
    if (!status && x.count)
        status = exchange_run(&x, op, set->rank);
    span_list_fini(&list);
    return status;
}
