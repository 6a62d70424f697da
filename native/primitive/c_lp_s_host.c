// The ends of C_LP_S in the host's memory.
#include "primitive/c_lp_s.h"


// code = Q(prescale * x[part] + worker error)
static unsigned char *host_own(struct exchange *x, int k, size_t s, struct segment_part part, unsigned char *room)
{
    const size_t nbytes = part.count * x->element;
    (void)k, (void)s;
    if (!part.count)
        return room;
    const void *value = span_source(x->list, part.begin * x->element, nbytes, x->encoder.value);
    if (x->prescale != 1.0) {
        x->run->kernels.scale[x->encoder.dtype](x->encoder.value, value, x->prescale, part.count);
        value = x->encoder.value;
    }
    encoder_encode(&x->encoder, room, value, part.count, x->worker_error ? x->worker_error + part.begin : NULL,
                   ENCODER_VALUES, x->begin + part.begin);
    return room;
}

// The mean that this rank has encoded is not in the way of the codes that made it.
static unsigned char *host_room(struct exchange *x, struct slot *slot, int k, size_t s)
{
    (void)s;
    return k == x->group->rank ? sent_at(x, slot, k) : received_at(x, slot, k);
}

static void host_store(struct exchange *x, struct segment_part part, const unsigned char *code)
{
    const size_t offset = part.begin * x->element, nbytes = part.count * x->element;
    void *to = span_target(x->list, offset, nbytes, x->result);
    x->encoder.codec->decode(to, code, part.count, &x->encoder.options);
    span_store(x->list, offset, nbytes, to);
}

static bhvd_status host_average(struct exchange *x, struct slot *slot, struct segment_part part)
{
    const size_t offset = part.begin * x->element, nbytes = part.count * x->element;
    bhvd_status status = c_lp_s_sum(x, slot, slot->gather, part.count);
    if (status)
        return status;
    void *to = span_target(x->list, offset, nbytes, x->result);
    x->encoder.kernels->from_float[x->encoder.dtype](to, x->sum, part.count);
    span_store(x->list, offset, nbytes, to);
    return BHVD_OK;
}

const struct code_ends c_lp_s_host = {
    .own = host_own,
    .room = host_room,
    .store = host_store,
    .average = host_average,
};
