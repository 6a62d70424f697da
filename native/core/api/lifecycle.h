// The life cycle of a context, in steps that tests call one by one.
#pragma once

#include "bagua_hvd.h"

// Creates everything except the connections, the parts that need them, and the progress thread.
bhvd_status context_new(const struct bhvd_context_options *options, bhvd_context **out, struct bhvd_error *error);
// Creates the parts that need the connections: coordinator, relay, heartbeats. BHVD_ERR_SYSTEM: no memory.
bhvd_status context_prepare(bhvd_context *ctx);
void context_free(bhvd_context *ctx);
