// Connects a rank to all others: who is where, which transport between which pair, everything authenticated.
#pragma once

#include "transport/connections.h"

// With whom a rank talks from the beginning, whatever is executed: sets those, by rank. Equal for both of a pair. False: no memory.
typedef bool (*choose_fn)(const struct bhvd_context_options *options, const int *host_of, bool *talks_to);

// On error nothing is left open. chooses: unused where all ranks share memory.
bhvd_status connections_init(struct connections *c, const struct bhvd_context_options *options, choose_fn chooses,
                             struct bhvd_error *error);
// No link is opened any more, from either side.
void connections_close(struct connections *c);
void connections_fini(struct connections *c);

// Something is to go over a link that lacks channels: connects them, where that is this rank's part, and does not wait.
// BHVD_ERR_SYSTEM: no memory.
bhvd_status connections_open(struct connections *c, struct link *link);
// The link that a connection has come of, or an attempt at one: then `error` says how it failed. NULL: none, or nobody's; `error` says
// so if this rank can accept no connection any more.
struct link *connections_take(struct connections *c, struct bhvd_error *error);
bool connections_have_arrivals(const struct connections *c);

// The inproc world's part: fills c from the world's memory.
bhvd_status inproc_connect(struct connections *c, void *world, struct bhvd_error *error);
