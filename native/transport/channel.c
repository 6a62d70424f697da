#include "transport/channel.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "base/size.h"
#include "transport/socket.h"

// ---------------------------------------------------------------------------------------------- rings: inproc and shm

size_t ring_write(struct ring *ring, size_t capacity, const void *src, size_t size)
{
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    uint64_t head = atomic_load(&ring->head);   // sequentially consistent: see shm_segment.h
    size_t n = size_min(size, capacity - (size_t)(tail - head));
    if (n == 0)
        return 0;
    size_t at = tail & (capacity - 1), first = size_min(n, capacity - at);
    memcpy(ring->data + at, src, first);
    memcpy(ring->data, (const char *)src + first, n - first);
    atomic_store(&ring->tail, tail + n);
    return n;
}

size_t ring_read(struct ring *ring, size_t capacity, void *dst, size_t size)
{
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    uint64_t tail = atomic_load(&ring->tail);
    size_t n = size_min(size, (size_t)(tail - head));
    if (n == 0)
        return 0;
    size_t at = head & (capacity - 1), first = size_min(n, capacity - at);
    memcpy(dst, ring->data + at, first);
    memcpy((char *)dst + first, ring->data, n - first);
    atomic_store(&ring->head, head + n);
    return n;
}

static bhvd_status channel_ring_send(struct channel *channel, const struct iovec *parts, int count, size_t *moved)
{
    *moved = 0;
    for (int i = 0; i < count; i++) {
        size_t n = ring_write(channel->tx, channel->capacity, parts[i].iov_base, parts[i].iov_len);
        *moved += n;
        if (n < parts[i].iov_len)
            break;
    }
    if (*moved)
        doorbell_ring(channel->peer_doorbell, channel->no_wakeup);
    return BHVD_OK;
}

static bhvd_status channel_ring_recv(struct channel *channel, void *dst, size_t size, size_t *moved)
{
    *moved = ring_read(channel->rx, channel->capacity, dst, size);
    if (*moved)
        doorbell_ring(channel->peer_doorbell, 1);  // wakes a writer that waits for space; an idle peer is not one
    return BHVD_OK;
}

static bool channel_ring_readable(const struct channel *channel)
{
    return atomic_load(&channel->rx->tail) != atomic_load_explicit(&channel->rx->head, memory_order_relaxed);
}

static bool channel_ring_writable(const struct channel *channel)
{
    uint64_t tail = atomic_load_explicit(&channel->tx->tail, memory_order_relaxed);
    return tail - atomic_load(&channel->tx->head) < channel->capacity;
}

const struct channel_ops channel_ring_ops = {
    .send = channel_ring_send,
    .recv = channel_ring_recv,
    .readable = channel_ring_readable,
    .writable = channel_ring_writable,
};

// ----------------------------------------------------------------------------------------------------------------- tcp

static bhvd_status channel_tcp_send(struct channel *channel, const struct iovec *parts, int count, size_t *moved)
{
    return socket_write(channel->fd, parts, count, moved);
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
