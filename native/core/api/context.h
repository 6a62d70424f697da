// The life of a context, in the steps that tests need one by one.
#pragma once

#include "bagua_hvd.h"

// Everything but the connections, what needs them, and the progress thread.
bhvd_status context_new(const struct bhvd_context_options *options, bhvd_context **out, struct bhvd_error *error);
// What needs the connections: coordinator, relay, heartbeats. BHVD_ERR_SYSTEM: no memory.
bhvd_status context_prepare(bhvd_context *ctx);
void context_free(bhvd_context *ctx);
