#include "core/carried.h"

#include <stdlib.h>
#include <string.h>

#include "collective/collective.h"
#include "core/select.h"

static bool is_small(const struct work *work)
{
    return work->kind == BHVD_ALLREDUCE && work->op != BHVD_OP_ADASUM && work->tensor_count == 1 && work->tensors[0].nbytes &&
           work->tensors[0].nbytes <= CARRIED_BYTES;
}

bool carried_takes(const bhvd_context *ctx, const struct bhvd_handle *op)
{
    const struct process_set *set = process_set_find(&ctx->sets, op->process_set);
    return is_small(&op->work) && !op->on_gpu && set && set->group.size > 1 && !set->group.shared && !ctx->relay.active &&
           ctx->run.allreduce_path == ALLREDUCE_CHOSEN;
}

static size_t stride_of(size_t nbytes) { return (nbytes + 63) / 64 * 64; }

bool carried_add(struct pending *pending, int member, const unsigned char *values, size_t nbytes)
{
    const struct request *request = pending->requests[member];
    if (request->kind != BHVD_ALLREDUCE || request->op == BHVD_OP_ADASUM || request->tensor_count != 1 || nbytes > CARRIED_BYTES ||
        nbytes != request_nbytes(request))
        return false;
    if (!pending->carried)
        pending->carried = aligned_alloc(64, (size_t)pending->size * stride_of(nbytes));
    if (!pending->carried)
        return false;
    memcpy(pending->carried + (size_t)member * stride_of(nbytes), values, nbytes);
    pending->carried_count++;
    return true;
}

void carried_put_sum(const struct run *run, const struct pending *pending, struct bytes *out)
{
    const struct request *request = pending->requests[pending->first];
    const size_t nbytes = request_nbytes(request), count = nbytes / bhvd_dtype_size(request->tensors[0].dtype);
    const struct work work = {.op = request->op, .prescale_factor = request->prescale_factor,
                              .postscale_factor = request->postscale_factor};
    const struct reduction reduction = reduction_by(run, &work, request->tensors[0].dtype, pending->size);
    unsigned char *sum = pending->carried;
    for (int i = 0; i < pending->size; i++) {
        unsigned char *values = pending->carried + (size_t)i * stride_of(nbytes);
        if (reduction.prescale != 1.0)
            reduction.scale(values, values, reduction.prescale, count);
        if (i)
            reduction.reduce(sum, sum, values, count);
    }
    if (reduction.postscale != 1.0)
        reduction.scale(sum, sum, reduction.postscale, count);
    bytes_put_u16(out, (uint16_t)nbytes);
    bytes_put(out, sum, nbytes);
}

bool carried_take_sum(struct bhvd_handle *op, const unsigned char *sum, size_t nbytes)
{
    if (!is_small(&op->work) || nbytes != op->work.tensors[0].nbytes || op->carried)
        return false;
    op->carried = malloc(nbytes);
    if (op->carried)
        memcpy(op->carried, sum, nbytes);
    return op->carried;
}
