// Channels over TCP sockets.
#include <errno.h>
#include <sys/socket.h>

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

const struct channel_ops channel_tcp_ops = {
    .name = "tcp",
    .send = channel_tcp_send,
    .recv = channel_tcp_recv,
    .readable = NULL,
    .writable = NULL,
    .unfinished = NULL,
};
