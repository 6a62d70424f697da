#include "primitive/primitive.h"

#include <stdlib.h>

#include "base/status.h"
#include "executor/group.h"

static bool shares_memory(const struct group *group) { return group->hierarchy || (group->shared && group->size > 1); }

static bhvd_status check_hosts(const struct executor *exec, const struct group *group, struct bhvd_error *error)
{
    const int *host_of = exec->connections.host_of;
    for (int i = 0; i < group->size && !shares_memory(group); i++) {
        for (int j = 0; j < i; j++) {
            if (host_of[group->ranks[i]] == host_of[group->ranks[j]])
                return error_set(error, BHVD_ERR_UNSUPPORTED,
                                 "process set %d has no shared memory of its own, which hierarchical needs: only the first "
                                 "%d sets of a job have", group->id, SHM_AREAS);
        }
    }
    return BHVD_OK;
}

static bhvd_status add_spans(struct executor *exec, struct collective *coll, struct span_list *list)
{
    for (size_t t = 0; t < coll->args.tensor_count; t++) {
        struct tensor *tensor = &coll->tensors[t];
        if (coll->args.kind != BHVD_D_LP_S && executor_allocate_result(exec, tensor, tensor->dim0))
            return exec->failure.status;
        if (!span_list_add(list, tensor))
            return executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for an operation of %zu tensors", coll->args.tensor_count);
    }
    return BHVD_OK;
}

bhvd_status primitive_execute(struct executor *exec, struct group *group, struct collective *coll, const struct gpu_codes *gpu,
                              struct plan *plan, struct bhvd_error *error)
{
    struct span_list list = {0};
    const bool is_central = coll->args.kind == BHVD_C_LP_S;
    const struct primitive *primitive = is_central ? &c_lp_s : coll->args.kind == BHVD_D_FP_S ? &d_fp_s : &d_lp_s;
    bhvd_status status = coll->args.hierarchical && !is_central ? check_hosts(exec, group, error) : BHVD_OK;
    if (!status && !(gpu && is_central))
        status = add_spans(exec, coll, &list);
    const bool is_hierarchical = list.nbytes && primitive_is_hierarchical(group, coll->args.kind, coll->args.hierarchical);
    if (!status && collective_nbytes(coll))
        status = (is_hierarchical ? primitive->hosts : primitive->among)(exec, group, coll, gpu, &list, plan);
    span_list_fini(&list);
    return status;
}

void *primitive_create(struct executor *exec, size_t size, const struct collective *coll, run_custom_step_fn run_custom_step,
                       struct span_list *list, struct plan *plan)
{
    void *primitive = malloc(size);
    if (!primitive) {
        executor_fail(exec, BHVD_ERR_SYSTEM, "no memory for an operation of %zu bytes", list->nbytes);
        return NULL;
    }
    plan->release = free;
    plan->operands = (struct operands){.run_custom_step = run_custom_step, .arg = primitive,
                                       .exclusive_memory = collective_exclusive_memory(coll)};
    plan->list = *list;
    *list = (struct span_list){0};
    return primitive;
}

bool primitive_is_hierarchical(const struct group *group, bhvd_kind kind, bool hierarchical)
{
    return hierarchical && (kind == BHVD_C_LP_S ? group->hierarchy != NULL : shares_memory(group));
}

int primitive_hosts(const struct group *group)
{
    return group->hierarchy ? group->hierarchy->hosts : shares_memory(group) ? 1 : group->size;
}
