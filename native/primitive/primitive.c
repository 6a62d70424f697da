#include "primitive/primitive.h"

#include "base/status.h"

bhvd_status primitive_spans(bhvd_context *ctx, struct bhvd_handle *op, struct span_list *list)
{
    for (size_t t = 0; t < op->tensor_count; t++) {
        struct tensor *tensor = &op->tensors[t];
        if (operation_allocate_result(tensor, tensor->dim0) || !span_list_add(list, tensor))
            return context_fail(ctx, BHVD_ERR_SYSTEM, "no memory for a result of %zu bytes", tensor->nbytes);
    }
    return BHVD_OK;
}

struct reduction primitive_within(const bhvd_context *ctx, bhvd_dtype dtype, double prescale, double postscale)
{
    return (struct reduction){
        .dtype = dtype,
        .reduce = ctx->kernels.reduce[KERNEL_SUM][dtype],
        .scale = ctx->kernels.scale[dtype],
        .prescale = prescale,
        .postscale = postscale,
    };
}

static bool shares_memory(const struct process_set *set) { return set->hierarchy || (set->shared && set->size > 1); }

bool primitive_has_levels(const struct process_set *set, bhvd_kind kind, bool hierarchical)
{
    return hierarchical && (kind == BHVD_C_LP_S ? set->hierarchy != NULL : shares_memory(set));
}

bhvd_status primitive_check_hosts(const bhvd_context *ctx, const struct process_set *set, struct bhvd_error *error)
{
    const int *host_of = ctx->connections.host_of;
    for (int i = 0; i < set->size && !shares_memory(set); i++) {
        for (int j = 0; j < i; j++) {
            if (host_of[set->ranks[i]] == host_of[set->ranks[j]])
                return error_set(error, BHVD_ERR_UNSUPPORTED,
                                 "process set %d has no shared memory of its own, which hierarchical needs: only the first "
                                 "%d sets of a job have", set->id, HOST_AREAS);
        }
    }
    return BHVD_OK;
}
