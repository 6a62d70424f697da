// Makes an operation of its arguments, and posts it.
#ifndef BHVD_POST_H
#define BHVD_POST_H

#include "core/context/operation.h"

// Copies the arguments; checks all that one rank can know by itself (spec: which exception, where).
bhvd_status operation_create(bhvd_context *ctx, const struct bhvd_args *args, struct bhvd_handle **out,
                             struct bhvd_error *error);
// Posts it. BHVD_ERR_ARGUMENT: one of this name is in progress; else the error that closed the context.
bhvd_status operation_enqueue(bhvd_context *ctx, struct bhvd_handle *operation, struct bhvd_error *error);

#endif
