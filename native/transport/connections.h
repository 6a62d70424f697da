// What a rank has to talk to all others.
#pragma once

#include "bagua_hvd.h"
#include "transport/host_memory.h"
#include "transport/mpi_api.h"
#include "transport/poller.h"

struct connections {
    int rank, size;
    struct link *links;             // by rank; links[rank] is unused
    struct poller poller;           // which of them there is something to do for
    struct listener *listener;      // opens them (listener.h); NULL: all ranks share memory
    uint64_t started;               // the number of the last execution that has started here; 0: none. The links read it
    uint32_t byte_ps;               // on rank 0: of the slowest line to another host that was looked at (probe.h); 0: none was
    struct doorbell doorbell;       // this rank's own
    struct host_memory host;        // shared with the ranks of local_ranks; of this rank alone for transport "tcp"
    int local_index, local_size;    // among the ranks that share `host`
    int *host_of;                   // by rank: its host, counted in the order of their first ranks
    bool owns_host_memory;          // to be unmapped in connections_fini
    int64_t emulated_bytes_per_s;       // of each stream; 0: all that it can
    bool has_communicator;
    union mpi_handle communicator;  // transport "mpi": of this context alone
};
