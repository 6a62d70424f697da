// Executions that add or remove a process set. Nothing else executes meanwhile.
#pragma once

#include "core/context/context.h"

// op's value becomes the set's id. error: the reason, if this rank alone cannot add it.
bhvd_status execute_process_set_add(bhvd_context *ctx, struct bhvd_operation *op, struct bhvd_error *error);
// op's value becomes 1, or 0 if there is no such set. First waits for the set's executions and pairwise operations.
bhvd_status execute_process_set_remove(bhvd_context *ctx, struct bhvd_operation *op);
