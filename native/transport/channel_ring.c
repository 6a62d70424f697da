// Channels over rings: inproc and shm.
#include "transport/transport.h"

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
