// Measures the time per byte between two hosts. One side sends trains of bytes, as long as the other side requests, up to the
// number that the kernel sends without waiting for acknowledgements; the other measures how long they take to arrive. The length
// doubles until that is some milliseconds: 5 ms in total at 100 Mbit/s, 8 at 1 Gbit/s, 2 at 10 Gbit/s, and up to five round trips.
#pragma once

#include "bagua_hvd.h"

// The two sides of a connected TCP socket with no data in flight, which the sender connected with SOCKET_UNSPACED. After
// BHVD_ERR_PEER_LOST or BHVD_ERR_TIMEOUT the socket is unusable.
bhvd_status probe_send(int fd, int64_t deadline_ns);
// beta_ps: picoseconds; 0: everything arrived at once. Measures nothing if it is not 0 before.
bhvd_status probe_receive(int fd, int64_t round_trip_ns, int64_t deadline_ns, uint32_t *beta_ps);
