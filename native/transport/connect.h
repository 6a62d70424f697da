// Connects a rank to all others: who is where, which transport between which pair, everything authenticated.
#ifndef BHVD_CONNECT_H
#define BHVD_CONNECT_H

#include "bagua_hvd.h"
#include "transport/host_memory.h"
#include "transport/mpi_api.h"
#include "transport/watch.h"

struct connections {
    int rank, size;
    struct link *links;             // by rank; links[rank] is unused
    struct watch watch;             // which of them there is something to do for
    struct door *door;              // opens them (door.h); NULL: all ranks share memory
    uint64_t started;               // the number of the last execution that has started here; 0: none. The links read it
    uint32_t byte_ps;               // on rank 0: of the slowest line to another host that was looked at (probe.h); 0: none was
    struct bell bell;               // this rank's own
    struct host_memory host;        // shared with the ranks of local_ranks; of this rank alone for transport "tcp"
    int local_index, local_size;    // among the ranks that share `host`
    int *host_of;                   // by rank: its host, counted in the order of their first ranks
    bool owns_host_memory;          // to be unmapped in connections_fini
    bool has_communicator;
    union mpi_handle communicator;  // transport "mpi": of this context alone
};

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

// Gives the link to `peer`, which is `local_index` of this host, its rings and bell; bell_fd becomes the link's.
void connections_use_rings(struct connections *c, int peer, int local_index, int bell_fd);

// The inproc world's part: fills c from the world's memory.
bhvd_status inproc_connect(struct connections *c, void *world, struct bhvd_error *error);

#endif
