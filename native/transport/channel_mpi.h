// Channels over MPI: messages between ranks of different hosts, in jobs that mpirun started. Control and liveness
// stay on the TCP socket of the link.
//
// The byte pipe is split into MPI messages of at most PIPE_SLOT_BYTES in slots that this file owns: after a peer's death MPI may
// access the memory of a request at any time, so it must not be the user's. MPI keeps the order of
// messages between two ranks with one tag.
#pragma once

#include "transport/connections.h"

// Turns the data channels to all ranks of other hosts into MPI channels. Collective over the job; the control sockets must be
// connected.
bhvd_status mpi_connect(struct connections *c, int64_t deadline_ns, struct bhvd_error *error);
// Frees the channels, except memory that MPI holds for a lost rank. Local. Does nothing without mpi_connect.
void mpi_disconnect(struct connections *c);
