// Channels over MPI: the messages between ranks of different hosts, in jobs that mpirun started. Control and liveness
// stay with the TCP socket of the link.
//
// The byte pipe is cut into MPI messages of at most PIPE_SLOT_BYTES, through slots of this file's own: MPI may touch the
// memory of a request for as long as it likes after the peer died, so it must not be the user's. MPI keeps the order of
// messages between two ranks with one tag.
#pragma once

#include "transport/connections.h"

// Makes the streams to all ranks of other hosts MPI channels. Collective over the job; the control sockets are there.
bhvd_status mpi_connect(struct connections *c, int64_t deadline_ns, struct bhvd_error *error);
// Frees the channels, but for what MPI holds of a lost rank's. Local. Nothing to do without mpi_connect.
void mpi_disconnect(struct connections *c);
