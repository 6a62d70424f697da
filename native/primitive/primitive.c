#include "primitive/primitive.h"

bhvd_status primitive_spans(bhvd_context *ctx, struct bhvd_handle *op, struct span_list *list)
{
    for (size_t t = 0; t < op->tensor_count; t++) {
        struct tensor *tensor = &op->tensors[t];
        if (operation_allocate_result(tensor, tensor->dim0) || !span_list_add(list, tensor))
            return context_fail(ctx, BHVD_ERR_SYSTEM, "no memory for a result of %zu bytes", tensor->nbytes);
    }
    return BHVD_OK;
}
