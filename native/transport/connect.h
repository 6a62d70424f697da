// Connects a rank to all others: finds hosts, chooses a transport for each pair, authenticates everything.
#pragma once

#include "transport/mpi_api.h"
#include "transport/poller.h"

// Everything a rank needs to communicate with all others.
struct connections {
    int rank, size;
    struct link *links;             // by rank; links[rank] is unused
    struct endpoint *endpoints;     // by rank, as are the proofs; NULL: one rank, or inproc
    struct bhvd_proofs *proofs;
    struct poller poller;           // finds the links that have work
    struct listener *listener;      // opens links (listener.h); NULL: all ranks share memory
    uint64_t started;               // the number of the last execution that has started here; 0: none. Read by the links
    uint32_t beta_ps;               // on rank 0: of the slowest measured line to another host (probe.c); 0: none measured
    struct doorbell doorbell;       // this rank's own
    struct shm_segment shm;         // shared with the ranks of this host; of this rank alone for transport "tcp"
    int local_index, local_size;    // among the ranks that share `shm`
    int *host_of;                   // by rank: its host, numbered in the order of their first ranks
    bool owns_shm_segment;          // unmapped in connections_fini
    int64_t emulated_bytes_per_s;       // limit for each data channel; 0: none
    bool has_communicator;
    union mpi_handle communicator;  // transport "mpi": this context's own
};

// The ranks that a rank communicates with from the beginning, in any job: sets them in talks_to. Symmetric. False: no memory.
typedef bool (*choose_fn)(const struct bhvd_context_options *options, const int *host_of, bool *talks_to);

// On error nothing is left open. chooses: unused where all ranks share memory.
bhvd_status connections_init(struct connections *c, const struct bhvd_context_options *options, choose_fn chooses,
                             struct bhvd_error *error);
// After this neither side opens links. Call while MPI still runs.
void connections_close(struct connections *c);
void connections_fini(struct connections *c);

// Called when a message is posted on a link that lacks channels: connects them if this rank is the connecting side; does not wait.
// BHVD_ERR_SYSTEM: no memory.
bhvd_status connections_open(struct connections *c, struct link *link);
// The link of the next arrival: a new connection, or an attempt that failed as `error` says. NULL: none, or it belongs to no link;
// `error` is set if this rank can no longer accept connections.
struct link *connections_take(struct connections *c, struct bhvd_error *error);
bool connections_have_arrivals(const struct connections *c);

// ------------------------------------------------------------------------------------- between connect.c and its parts

// The state of connections_init.
struct connecting {
    struct connections *c;
    const struct bhvd_context_options *options;
    bool *talks_to;                     // by rank: connected from the beginning
    int tcp_listen_fd, local_listen_fd;
    int memory_fd;
    int64_t deadline_ns;
    struct bhvd_error *error;
};

// Does the rank share memory with this one?
bool connecting_shares_memory(const struct connecting *k, int rank);

// connect_local.c. A UNIX socket for each pair of ranks of one host passes the host's memory and the doorbells, and then stays open
// to detect the peer's death.
bhvd_status local_listen(struct connecting *k, const struct endpoint *mine);
// Connects to a rank of this host.
bhvd_status local_connect(struct connecting *k, int rank);
// Both sides of an authenticated UNIX connection: they swap doorbells; the host's first rank adds the memory.
bhvd_status local_join(struct connecting *k, int rank, int fd, int64_t deadline_ns);
// Called on the host's first rank only: creates the memory.
bhvd_status local_make_memory(struct connecting *k);
// For inproc: fills c from the world's memory.
bhvd_status inproc_connect(struct connections *c, void *world, struct bhvd_error *error);

// probe.c. Rank 0 measures the lines to some hosts.
bhvd_status probe_lines(struct connecting *k);
// The two sides of a connected TCP socket with no data in flight, which the sender connected with SOCKET_UNSPACED. After
// BHVD_ERR_PEER_LOST or BHVD_ERR_TIMEOUT the socket is unusable.
bhvd_status probe_send(int fd, int64_t deadline_ns);
// beta_ps: picoseconds; 0: everything arrived at once. Measures nothing if it is not 0 before.
bhvd_status probe_receive(int fd, int64_t round_trip_ns, int64_t deadline_ns, uint32_t *beta_ps);

// channel_mpi.c. Turns the data channels to all ranks of other hosts into MPI channels. Collective over the job; the control
// sockets must be connected.
bhvd_status mpi_connect(struct connections *c, int64_t deadline_ns, struct bhvd_error *error);
// Frees the channels, except memory that MPI holds for a lost rank. Local. Does nothing without mpi_connect.
void mpi_disconnect(struct connections *c);
