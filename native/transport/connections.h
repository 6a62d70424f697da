// Everything a rank needs to communicate with all others.
#pragma once

#include "bagua_hvd.h"
#include "transport/shm_segment.h"
#include "transport/mpi_api.h"
#include "transport/poller.h"

struct connections {
    int rank, size;
    struct link *links;             // by rank; links[rank] is unused
    struct endpoint *endpoints;     // by rank, as are the proofs; NULL: one rank, or inproc
    struct bhvd_proofs *proofs;
    struct poller poller;           // finds the links that have work
    struct listener *listener;      // opens links (listener.h); NULL: all ranks share memory
    uint64_t started;               // the number of the last execution that has started here; 0: none. Read by the links
    uint32_t beta_ps;               // on rank 0: of the slowest measured line to another host (probe.h); 0: none measured
    struct doorbell doorbell;       // this rank's own
    struct shm_segment shm;         // shared with the ranks of this host; of this rank alone for transport "tcp"
    int local_index, local_size;    // among the ranks that share `shm`
    int *host_of;                   // by rank: its host, numbered in the order of their first ranks
    bool owns_shm_segment;          // unmapped in connections_fini
    int64_t emulated_bytes_per_s;       // limit for each data channel; 0: none
    bool has_communicator;
    union mpi_handle communicator;  // transport "mpi": this context's own
};
