// TCP between numeric addresses of IPv4 or IPv6: what the handshake, the rendezvous and the tcp transport share.
//
// Every descriptor made here is close-on-exec and non-blocking; every wait ends at a deadline (base/clock.h), restarts
// after a signal, and writing to a dead peer never raises SIGPIPE. The functions that move bytes only return a status:
// their callers know what was being said to whom, and write the sentence.
#pragma once

#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bagua_hvd.h"

// On the first port from `port` to last_port that is free; 0: any. *bound_port is the one taken. host "::": all interfaces, by IPv4
// too. BHVD_ERR_ARGUMENT: not a numeric address. BHVD_ERR_SYSTEM: in use or not of this machine, naming both.
bhvd_status socket_listen(const char *host, int port, int last_port, int *fd, int *bound_port, struct bhvd_error *error);

// BHVD_ERR_TIMEOUT: nobody came; a deadline of 0 never waits. BHVD_ERR_SYSTEM: out of descriptors or memory.
bhvd_status socket_accept(int listen_fd, int64_t deadline_ns, int *fd, struct bhvd_error *error);

// One attempt. BHVD_ERR_PEER_LOST: no route to it at the moment. BHVD_ERR_SYSTEM, with errno: refused, or
// no descriptor. BHVD_ERR_TIMEOUT: no reply.
// BHVD_ERR_ARGUMENT: not numeric.
bhvd_status socket_connect(const char *host, int port, int64_t deadline_ns, int *fd, struct bhvd_error *error);
// The same without its wait: begin; then, when it can be written to, complete; on an error the caller closes it. No BHVD_ERR_TIMEOUT.
// congestion: the algorithm of congestion control; NULL, or unknown: the usual one.
bhvd_status socket_connect_begin(const char *host, int port, const char *congestion, int *fd, struct bhvd_error *error);
bhvd_status socket_connect_complete(int fd, const char *host, int port, struct bhvd_error *error);

// One that leaves no spaces between the packets of a young connection, as BBR does.
#define SOCKET_UNSPACED "reno"

enum { HOST_SIZE = 48 };                // of a numeric address as text

// As people write it: 10.0.0.1:29400, [fd00::1]:29400.
struct socket_name { char text[64]; };
struct socket_name socket_name(const char *host, int port);

// What to do about an error of the system, to be put behind its text; "" when there is nothing.
const char *socket_remedy(int failure);

// Move what fits now, at most `size` (> 0) bytes; *moved may be 0. BHVD_ERR_PEER_LOST: broken or, for read, at its end.
bhvd_status socket_read(int fd, void *dst, size_t size, size_t *moved);
bhvd_status socket_write(int fd, const void *src, size_t size, size_t *moved);
// All of it at once, which a socket takes of the first few bytes. BHVD_ERR_PEER_LOST: broken, or it does not.
bhvd_status socket_write_at_once(int fd, const void *src, size_t size);

// Reads what has come of a message of `size` bytes, of which *done are there. BHVD_IN_PROGRESS: not all of it has.
bhvd_status socket_read_part(int fd, void *dst, size_t size, size_t *done);

// Until one of these events of poll(), an error or a hang-up. BHVD_ERR_TIMEOUT, BHVD_ERR_PEER_LOST.
bhvd_status socket_await(int fd, short events, int64_t deadline_ns);
// Until one of them has an event; none may have, by the deadline or before.
void socket_poll(struct pollfd *polls, size_t count, int64_t deadline_ns);

// Of a UNIX socket: is the other side a process of this user?
bool socket_is_of_this_user(int fd);

// Between the two kernels, as far as the connection knows; 0: it does not.
int64_t socket_round_trip_ns(int fd);
enum { SOCKET_FAR_NS = 2000000 };       // a round trip to another site
// What is sent over fd is spaced to so many bytes a second, at most; 0: it is not.
void socket_limit_rate(int fd, int64_t bytes_per_s);
// Bytes that the kernel sends without an answer to any of them; 0: unknown.
size_t socket_window(int fd);

// Move exactly `size` bytes. BHVD_ERR_TIMEOUT or BHVD_ERR_PEER_LOST: an unknown part of them was moved.
bhvd_status socket_read_full(int fd, void *dst, size_t size, int64_t deadline_ns);
bhvd_status socket_write_full(int fd, const void *src, size_t size, int64_t deadline_ns);
