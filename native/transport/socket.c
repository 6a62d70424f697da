#include "transport/socket.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/status.h"

enum {
    NO_MEMORY_PAUSE_MS = 100,       // when the kernel lacks memory, so as not to spin
    KEEPALIVE_SECONDS = 30,         // of idle time: firewalls forget a connection after minutes
    KEEPALIVE_PROBES = 10           // without a reply before it is broken
};

const char *socket_remedy(int failure)
{
    switch (failure) {
    case EMFILE:
        return "; raise the limit of open files (ulimit -n)";
    case EADDRNOTAVAIL:
        return "; no interface of this machine has this address";
    default:
        return "";
    }
}

// The port is at the same offset in both.
union socket_address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

static bhvd_status address_parse(const char *host, int port, union socket_address *out, struct bhvd_error *error)
{
    *out = (union socket_address){.v6 = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)}};
    if (port < 0 || port > UINT16_MAX)
        return error_set(error, BHVD_ERR_ARGUMENT, "%d is not a port: ports are 0 to 65535", port);
    if (host && inet_pton(AF_INET6, host, &out->v6.sin6_addr) == 1)
        return BHVD_OK;
    out->v4 = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    if (!host || inet_pton(AF_INET, host, &out->v4.sin_addr) != 1)
        return error_set(error, BHVD_ERR_ARGUMENT, "'%s' is not a numeric address such as 10.0.0.1 or fd00::1",
                         host ? host : "(null)");
    return BHVD_OK;
}

static socklen_t address_size(const union socket_address *address)
{
    return address->any.sa_family == AF_INET6 ? sizeof address->v6 : sizeof address->v4;
}

struct socket_name socket_name(const char *host, int port)
{
    struct socket_name name;
    snprintf(name.text, sizeof name.text, strchr(host, ':') ? "[%s]:%d" : "%s:%d", host, port);
    return name;
}

// Small messages are sent at once, because peers wait for them. Keepalive keeps connections that are idle for long, as during an
// evaluation, known to firewalls on the path.
static void set_options(int fd)
{
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &(int){1}, sizeof(int));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &(int){KEEPALIVE_SECONDS}, sizeof(int));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &(int){KEEPALIVE_SECONDS}, sizeof(int));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &(int){KEEPALIVE_PROBES}, sizeof(int));
}

bhvd_status socket_await(int fd, short events, int64_t deadline_ns)
{
    for (;;) {
        struct pollfd p = {.fd = fd, .events = events};
        int n = poll(&p, 1, clock_remaining_ms(deadline_ns));
        if (n > 0)
            return BHVD_OK;     // also an error or hang-up: the next call on fd reports it
        if (n < 0 && errno != EINTR)
            return BHVD_ERR_PEER_LOST;
        if (clock_remaining_ms(deadline_ns) == 0)
            return BHVD_ERR_TIMEOUT;
    }
}

static bhvd_status listen_on(const char *host, int port, int *fd, int *bound_port, struct bhvd_error *error)
{
    union socket_address address;
    bhvd_status status = address_parse(host, port, &address, error);
    if (status)
        return status;
    int s = socket(address.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (s < 0 && errno == EAFNOSUPPORT && strcmp(host, "::") == 0)      // a kernel without IPv6
        return listen_on("0.0.0.0", port, fd, bound_port, error);
    if (s < 0)
        return error_set(error, BHVD_ERR_SYSTEM, "cannot make a socket to listen on %s: %m%s", socket_name(host, port).text,
                         socket_remedy(errno));

    setsockopt(s, IPPROTO_IPV6, IPV6_V6ONLY, &(int){0}, sizeof(int));
    // On Linux this only skips the wait for old connections to disappear; two listeners still exclude each other.
    setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    socklen_t length = sizeof address;
    if (bind(s, &address.any, address_size(&address)) || listen(s, SOMAXCONN) || getsockname(s, &address.any, &length)) {
        const int failure = errno;
        close(s);
        errno = failure;
        return error_set(error, BHVD_ERR_SYSTEM, "cannot listen on %s: %m%s", socket_name(host, port).text, socket_remedy(failure));
    }
    *fd = s;
    *bound_port = ntohs(address.v4.sin_port);
    return BHVD_OK;
}

bhvd_status socket_listen(const char *host, int port, int last_port, int *fd, int *bound_port, struct bhvd_error *error)
{
    const int first = port;
    bhvd_status status;
    do
        status = listen_on(host, port, fd, bound_port, error);
    while (status == BHVD_ERR_SYSTEM && port++ < last_port);
    if (status == BHVD_ERR_SYSTEM && errno == EADDRINUSE && first > 0) {
        char to_last[16] = "";
        if (last_port > first)
            snprintf(to_last, sizeof to_last, "-%d", last_port);
        return error_set(error, status, "cannot listen on %s%s: no port of BAGUA_HVD_PORTS is free: widen the range or unset it",
                         socket_name(host, first).text, to_last);
    }
    return status;
}

bhvd_status socket_accept(int listen_fd, int *fd)
{
    while ((*fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) < 0) {
        const int failure = errno;
        // Without a free descriptor Linux refuses even if there is no connection to accept.
        const bool nobody_may_be_there = failure == EAGAIN || failure == EMFILE || failure == ENFILE;
        if (nobody_may_be_there && socket_await(listen_fd, POLLIN, 0))
            return BHVD_ERR_TIMEOUT;
        errno = failure;
        switch (failure) {
        case EBADF: case EINVAL: case ENOTSOCK: case EOPNOTSUPP: case EMFILE: case ENFILE: case ENOBUFS: case ENOMEM:
            return BHVD_ERR_SYSTEM;
        default:
            break;      // it has arrived only now, or it failed (accept(2) passes its error on): take the next
        }
    }
    set_options(*fd);
    return BHVD_OK;
}

// A connect to a local port where nobody listens may be assigned that very port as its own, and TCP
// then connects the socket to itself.
static bool is_connected_with_itself(int fd)
{
    union socket_address here = {0}, there = {0};
    socklen_t here_size = sizeof here, there_size = sizeof there;
    return getsockname(fd, &here.any, &here_size) == 0 && getpeername(fd, &there.any, &there_size) == 0
           && here_size == there_size && memcmp(&here, &there, here_size) == 0;
}

static bhvd_status explain_connect(int failure, const char *host, int port, struct bhvd_error *error)
{
    const bool no_route = failure == EHOSTUNREACH || failure == ENETUNREACH;
    errno = failure;
    return error_set(error, no_route ? BHVD_ERR_PEER_LOST : BHVD_ERR_SYSTEM, "cannot connect to %s: %m",
                     socket_name(host, port).text);
}

bhvd_status socket_connect_begin(const char *host, int port, const char *congestion, int *fd, struct bhvd_error *error)
{
    union socket_address address;
    bhvd_status status = address_parse(host, port, &address, error);
    if (status)
        return status;
    int s = socket(address.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (s < 0)
        return error_set(error, BHVD_ERR_SYSTEM, "cannot make a socket to connect to %s: %m%s", socket_name(host, port).text,
                         socket_remedy(errno));
    if (congestion)
        setsockopt(s, IPPROTO_TCP, TCP_CONGESTION, congestion, (socklen_t)strlen(congestion));
    // A connect that a signal interrupts continues by itself, as with EINPROGRESS.
    if (connect(s, &address.any, address_size(&address)) == 0 || errno == EINPROGRESS || errno == EINTR) {
        *fd = s;
        return BHVD_OK;
    }
    const int failure = errno;
    close(s);
    return explain_connect(failure, host, port, error);
}

bhvd_status socket_connect_complete(int fd, const char *host, int port, struct bhvd_error *error)
{
    int failure = 0;
    socklen_t size = sizeof failure;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &failure, &size))
        failure = errno;
    if (failure == 0 && is_connected_with_itself(fd))
        failure = ECONNREFUSED;
    if (failure)
        return explain_connect(failure, host, port, error);
    set_options(fd);
    return BHVD_OK;
}

bhvd_status socket_read(int fd, void *dst, size_t size, size_t *moved)
{
    ssize_t n;
    do
        n = recv(fd, dst, size, MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    *moved = n > 0 ? (size_t)n : 0;
    return n > 0 || (n < 0 && errno == EAGAIN) ? BHVD_OK : BHVD_ERR_PEER_LOST;
}

bhvd_status socket_write(int fd, const struct iovec *parts, int count, size_t *moved)
{
    struct msghdr message = {.msg_iov = (struct iovec *)parts, .msg_iovlen = (size_t)count};
    ssize_t n;
    do
        n = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    *moved = n > 0 ? (size_t)n : 0;
    return n >= 0 || errno == EAGAIN ? BHVD_OK : BHVD_ERR_PEER_LOST;
}

bhvd_status socket_write_at_once(int fd, const void *src, size_t size)
{
    size_t moved;
    bhvd_status status = socket_write(fd, &(struct iovec){(void *)src, size}, 1, &moved);
    return status || moved == size ? status : BHVD_ERR_PEER_LOST;
}

bhvd_status socket_read_part(int fd, void *dst, size_t size, size_t *done)
{
    while (*done < size) {
        size_t moved;
        bhvd_status status = socket_read(fd, (char *)dst + *done, size - *done, &moved);
        if (status || moved == 0)
            return status ? status : BHVD_IN_PROGRESS;
        *done += moved;
    }
    return BHVD_OK;
}

bhvd_status socket_read_full(int fd, void *dst, size_t size, int64_t deadline_ns)
{
    size_t done = 0;
    bhvd_status status;
    while ((status = socket_read_part(fd, dst, size, &done)) == BHVD_IN_PROGRESS) {
        status = socket_await(fd, POLLIN, deadline_ns);
        if (status)
            break;
    }
    return status;
}

bhvd_status socket_write_full(int fd, const void *src, size_t size, int64_t deadline_ns)
{
    for (size_t done = 0, moved; done < size; done += moved) {
        bhvd_status status = socket_write(fd, &(struct iovec){(char *)src + done, size - done}, 1, &moved);
        if (!status && moved == 0)
            status = socket_await(fd, POLLOUT, deadline_ns);
        if (status)
            return status;
    }
    return BHVD_OK;
}

void socket_poll(struct pollfd *polls, size_t count, int64_t deadline_ns)
{
    if (poll(polls, count, clock_remaining_ms(deadline_ns)) >= 0)
        return;
    for (size_t i = 0; i < count; i++)
        polls[i].revents = 0;
    if (errno != EINTR)
        poll(NULL, 0, NO_MEMORY_PAUSE_MS);
}

bool socket_is_of_this_user(int fd)
{
    struct ucred peer;
    socklen_t size = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

void socket_limit_rate(int fd, int64_t bytes_per_s)
{
    if (bytes_per_s > 0)
        setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &(uint64_t){(uint64_t)bytes_per_s}, sizeof(uint64_t));
}

int64_t socket_round_trip_ns(int fd)
{
    struct tcp_info info = {0};
    socklen_t size = sizeof info;
    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) ? 0 : (int64_t)info.tcpi_rtt * 1000;
}

size_t socket_window(int fd)
{
    struct tcp_info info = {0};
    socklen_t size = sizeof info;
    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) ? 0 : (size_t)info.tcpi_snd_cwnd * info.tcpi_snd_mss;
}
