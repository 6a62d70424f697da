// Channels over TCP sockets.
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "transport/socket.h"
#include "transport/transport.h"

static bhvd_status channel_tcp_send(struct channel *channel, const struct iovec *parts, int count, size_t *moved)
{
    struct msghdr message = {.msg_iov = (struct iovec *)parts, .msg_iovlen = count};
    ssize_t n;
    do
        n = sendmsg(channel->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    *moved = n > 0 ? (size_t)n : 0;
    return n >= 0 || errno == EAGAIN || errno == EWOULDBLOCK ? BHVD_OK : BHVD_ERR_PEER_LOST;
}

static bhvd_status channel_tcp_recv(struct channel *channel, void *dst, size_t size, size_t *moved)
{
    *moved = 0;
    return size ? socket_read(channel->fd, dst, size, moved) : BHVD_OK;
}

// How long the kernel has had no reply to sent packets, or to probes of a peer whose receive window is full. A peer
// that reads nothing still replies: its kernel does.
static int64_t channel_tcp_silence_ns(struct channel *channel, int64_t now_ns)
{
    struct tcp_info info = {0};
    socklen_t size = sizeof info;
    if (getsockopt(channel->fd, IPPROTO_TCP, TCP_INFO, &info, &size) || (!info.tcpi_unacked && !info.tcpi_probes)) {
        channel->unanswered_since_ns = 0;
        return -1;
    }
    int64_t answered_ns = now_ns - clock_ms_ns(info.tcpi_last_ack_recv);
    if (!channel->unanswered_since_ns)
        channel->unanswered_since_ns = now_ns;      // the connection may have been idle for long before
    if (channel->unanswered_since_ns < answered_ns)
        channel->unanswered_since_ns = answered_ns;
    return now_ns - channel->unanswered_since_ns;
}

const struct channel_ops channel_tcp_ops = {
    .send = channel_tcp_send,
    .recv = channel_tcp_recv,
    .silence_ns = channel_tcp_silence_ns,
};
