// Runs executions.
#ifndef BHVD_SELECT_H
#define BHVD_SELECT_H

#include "core/context.h"

// Chooses the algorithm, and fills results and values. error: filled when it cannot be done and the context stays usable.
bhvd_status select_execute(bhvd_context *ctx, const struct execution *execution, struct bhvd_error *error);

#endif
