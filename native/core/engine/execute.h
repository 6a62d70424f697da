// Chooses how an execution runs, and runs it.
#pragma once

#include "core/context/context.h"

// Chooses the algorithm, and fills in results and values; or, for one over links alone, only makes the execution's plan, which can
// run concurrently. error: set if it cannot be executed and the context stays usable.
bhvd_status execution_run(bhvd_context *ctx, struct execution *execution, struct bhvd_error *error);

// The same for a pairwise operation that all neighbors have posted (pairwise.h).
bhvd_status execution_run_pairwise(bhvd_context *ctx, struct bhvd_operation *op, struct plan *plan, struct bhvd_error *error);
