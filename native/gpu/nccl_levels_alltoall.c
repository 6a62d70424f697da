// Alltoall in two levels: parts for other hosts to the host | from there to each rank as in alltoall_links.c | what came, to
// the GPU. Meanwhile NCCL carries the parts between members of this host.
// Between GPU and host: only parts of other hosts' members, N (n-m)/n bytes each way where m of n members are here and all parts
// are equal. Wire: these, straight to where they belong.
#include <stdlib.h>

#include "gpu/nccl_levels.h"

// What goes between this member and those of other hosts; nothing between members of this host.
struct far {
    size_t *sent_to, *received_from;    // of the whole, by position
    size_t sent, received;
    struct device_buffer *out, *in;     // pinned
};

static void select_far(const struct nccl_run *x, const struct parts *parts, struct far *far)
{
    const int n = x->whole->size;
    for (int i = 0, here = 0; i < n; i++) {
        if (nccl_run_has(x, i, here)) {
            here++;
            continue;
        }
        far->sent += far->sent_to[i] = parts->sent[i];
        far->received += far->received_from[i] = parts->received[i];
    }
}

// Between the device's memory, where all parts lie one after the other, and pinned memory, where those of other hosts do. What
// is side by side on both is copied at once. bytes: of all parts; out: to pinned memory.
static bhvd_status copy_far(struct nccl_run *x, const size_t *bytes, bool out, const unsigned char *src, unsigned char *dst,
                            struct device_span *table)
{
    const int n = x->whole->size;
    size_t spans = 0;
    for (int i = 0, here = 0; i < n; i++) {
        const size_t nbytes = bytes[i];
        const bool is_far = !nccl_run_has(x, i, here);
        struct device_span *last = &table[spans ? spans - 1 : 0];
        here += !is_far;
        if (is_far && nbytes && spans && (const char *)last->src + last->nbytes == (const char *)src &&
            (char *)last->dst + last->nbytes == (char *)dst)
            last->nbytes += nbytes;
        else if (is_far && nbytes)
            table[spans++] = (struct device_span){src, dst, nbytes, 0};
        src += is_far || out ? nbytes : 0;
        dst += is_far || !out ? nbytes : 0;
    }
    return nccl_run_checked(x, device_copy_spans(x->device, table, spans, x->stream));
}

bhvd_status nccl_levels_alltoall(struct nccl_run *x, const unsigned char *src, unsigned char *dst,
                                 const struct parts *parts)
{
    const size_t n = (size_t)x->whole->size;
    struct far far = {.sent_to = calloc(2 * n, sizeof *far.sent_to)};
    struct device_buffer *tables = NULL;
    struct device_span *table = NULL;   // both ways
    if (!far.sent_to)
        return run_fail(x->run, BHVD_ERR_SYSTEM, "no memory for a collective of %zu ranks", n);
    far.received_from = far.sent_to + n;
    select_far(x, parts, &far);
    bhvd_status status = nccl_run_scratch(x, MEMORY_PINNED, far.sent, &far.out);
    if (!status)
        status = nccl_run_scratch(x, MEMORY_PINNED, far.received, &far.in);
    if (!status)
        status = nccl_run_scratch(x, MEMORY_PINNED, 2 * n * sizeof *table, &tables);
    if (!status) {
        table = (struct device_span *)(void *)tables->data;
        status = copy_far(x, parts->sent, true, src, far.out->data, table);
    }
    if (!status)
        status = nccl_levels_mark(x, far.out);
    if (!status)
        status = nccl_run_alltoall(x, src, dst, parts);
    if (!status)
        status = nccl_levels_wait_for(x, far.out);
    if (!status)
        status = alltoall_links(x->run, x->whole, far.out->data, far.in->data,
                                   &(struct parts){far.sent_to, far.received_from, 0});
    if (!status)
        status = copy_far(x, parts->received, false, far.in->data, dst, table + n);
    free(far.sent_to);
    return status;
}
