// Runs executions.
#pragma once

#include "core/context/context.h"

// Chooses the algorithm, and fills results and values; or, when that is one over links alone, only makes the execution's plan: it can go
// on beside others. error: filled when it cannot be done and the context stays usable.
bhvd_status select_execute(bhvd_context *ctx, struct execution *execution, struct bhvd_error *error);

// The same of an operation whose neighbors are there (pairwise.h).
bhvd_status select_pairwise(bhvd_context *ctx, struct bhvd_handle *op, struct plan *plan, struct bhvd_error *error);
