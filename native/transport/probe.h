// How long a byte takes between two hosts. One side sends trains of bytes, each as long as the other has asked for and as the kernel
// sends without waiting for an answer; the other looks over what time the line has stretched them. It is doubled until that is
// some milliseconds: 5 ms in all at 100 Mbit/s, 8 at 1 Gbit/s, 2 at 10 Gbit/s, and up to five round trips.
#pragma once

#include "bagua_hvd.h"

// The two sides of a connected TCP socket that nothing is on its way over; the sender connected it by SOCKET_UNSPACED. BHVD_ERR_PEER_LOST,
// BHVD_ERR_TIMEOUT: it is of no use any more.
bhvd_status probe_send(int fd, int64_t deadline_ns);
// byte_ps: picoseconds; 0: all came at once. If it is not 0 before, nothing is measured.
bhvd_status probe_receive(int fd, int64_t round_trip_ns, int64_t deadline_ns, uint32_t *byte_ps);
