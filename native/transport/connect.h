// Connects a rank to all others: finds hosts, chooses a transport for each pair, authenticates everything.
#pragma once

#include "transport/connections.h"

// The ranks that a rank communicates with from the beginning, in any job: sets them in talks_to. Symmetric. False: no memory.
typedef bool (*choose_fn)(const struct bhvd_context_options *options, const int *host_of, bool *talks_to);

// On error nothing is left open. chooses: unused where all ranks share memory.
bhvd_status connections_init(struct connections *c, const struct bhvd_context_options *options, choose_fn chooses,
                             struct bhvd_error *error);
// After this neither side opens links.
void connections_close(struct connections *c);
void connections_fini(struct connections *c);

// Called when a message is posted on a link that lacks channels: connects them if this rank is the connecting side; does not wait.
// BHVD_ERR_SYSTEM: no memory.
bhvd_status connections_open(struct connections *c, struct link *link);
// The link of the next arrival: a new connection, or an attempt that failed as `error` says. NULL: none, or it belongs to no link;
// `error` is set if this rank can no longer accept connections.
struct link *connections_take(struct connections *c, struct bhvd_error *error);
bool connections_have_arrivals(const struct connections *c);

// For inproc: fills c from the world's memory.
bhvd_status inproc_connect(struct connections *c, void *world, struct bhvd_error *error);
