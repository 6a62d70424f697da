// TCP between numeric addresses of IPv4 or IPv6, for the handshake, the rendezvous and the tcp transport.
//
// Every descriptor made here is close-on-exec and non-blocking; every wait ends at a deadline (base/clock.h), restarts
// after a signal, and writing to a dead peer never raises SIGPIPE. Functions that move bytes return only a status:
// their callers know the context and write the message.
#pragma once

#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "bagua_hvd.h"

// Listens on the first free port from `port` to last_port; 0: any. *bound_port is the port used. host "::": all interfaces, also
// IPv4. BHVD_ERR_ARGUMENT: not a numeric address. BHVD_ERR_SYSTEM: in use or not an address of this machine, naming both.
bhvd_status socket_listen(const char *host, int port, int last_port, int *fd, int *bound_port, struct bhvd_error *error);

// Does not block. BHVD_ERR_TIMEOUT: no connection. BHVD_ERR_SYSTEM, with errno: out of descriptors or memory.
bhvd_status socket_accept(int listen_fd, int *fd);

// One attempt without blocking: begin; when it is writable, complete; on an error of complete the caller closes it.
// BHVD_ERR_PEER_LOST: no route to it at the moment. BHVD_ERR_SYSTEM, with errno: refused, or no descriptor. BHVD_ERR_ARGUMENT: not
// numeric.
// congestion: the congestion control algorithm; NULL, or unknown: the default.
bhvd_status socket_connect_begin(const char *host, int port, const char *congestion, int *fd, struct bhvd_error *error);
bhvd_status socket_connect_complete(int fd, const char *host, int port, struct bhvd_error *error);

// A congestion control that does not pace the packets of a young connection, unlike BBR.
#define SOCKET_UNSPACED "reno"

enum { HOST_SIZE = 48 };                // large enough for a numeric address as text

// In the usual notation: 10.0.0.1:29400, [fd00::1]:29400.
struct socket_name { char text[64]; };
struct socket_name socket_name(const char *host, int port);

// Advice about a system error, appended to its text; "" if there is none.
const char *socket_remedy(int failure);

// Reads at most `size` (> 0) bytes without blocking; *moved may be 0. BHVD_ERR_PEER_LOST: broken, or at its end.
bhvd_status socket_read(int fd, void *dst, size_t size, size_t *moved);
// As socket_read. Writes the parts one after the other.
bhvd_status socket_write(int fd, const struct iovec *parts, int count, size_t *moved);
// Writes all of a new connection's first few bytes at once. BHVD_ERR_PEER_LOST: broken, or they did not fit.
bhvd_status socket_write_at_once(int fd, const void *src, size_t size);

// Continues to read a message of `size` bytes, of which *done have been read. BHVD_IN_PROGRESS: it is not complete yet.
bhvd_status socket_read_part(int fd, void *dst, size_t size, size_t *done);

// Waits for one of these events of poll(), an error or a hang-up. BHVD_ERR_TIMEOUT, BHVD_ERR_PEER_LOST.
bhvd_status socket_await(int fd, short events, int64_t deadline_ns);
// Waits until one of them has an event; may return early without one.
void socket_poll(struct pollfd *polls, size_t count, int64_t deadline_ns);

// For a UNIX socket: is the peer a process of this user?
bool socket_is_of_this_user(int fd);

// Round-trip time between the two kernels, as measured by the connection; 0: unknown.
int64_t socket_round_trip_ns(int fd);
enum { SOCKET_FAR_NS = 2000000 };       // a round trip to another site
// Paces sends over fd to at most this rate; 0: no limit.
void socket_limit_rate(int fd, int64_t bytes_per_s);
// Number of bytes that the kernel sends without an acknowledgement; 0: unknown.
size_t socket_window(int fd);

// Move exactly `size` bytes. BHVD_ERR_TIMEOUT or BHVD_ERR_PEER_LOST: an unknown part of them was moved.
bhvd_status socket_read_full(int fd, void *dst, size_t size, int64_t deadline_ns);
bhvd_status socket_write_full(int fd, const void *src, size_t size, int64_t deadline_ns);
