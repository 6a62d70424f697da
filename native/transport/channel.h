// A transport moves bytes between two ranks and does not interpret them: framing, queues and time limits are in link.c.
//
//     inproc   rings in the process's memory          (tests: n ranks are n threads)
//     shm      the same rings in a shared memfd       (ranks of one host)
//     tcp      sockets                                (between hosts)
//     mpi      an existing MPI                        (between hosts, in jobs that mpirun started)
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>
#include <unistd.h>

#include "bagua_hvd.h"
#include "transport/shm_segment.h"

struct channel;

static inline void fd_close(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

// Called by the holder of engine_lock only. Neither call blocks.
struct channel_ops {
    // Moves bytes without blocking; *moved may be 0. BHVD_ERR_PEER_LOST: the pipe is broken or, for recv, at its end.
    // BHVD_ERR_SYSTEM: no memory.
    bhvd_status (*send)(struct channel *channel, const struct iovec *parts, int count, size_t *moved);
    bhvd_status (*recv)(struct channel *channel, void *dst, size_t size, size_t *moved);
    // Is there something to read? True on a broken pipe too. Cheap: no system call. NULL: only poll() can tell.
    bool (*readable)(const struct channel *channel);
    bool (*writable)(const struct channel *channel);
    // Polls once: are bytes in flight that move only while this rank polls? NULL: never.
    bool (*unfinished)(const struct channel *channel);
    // How long has the peer's host acknowledged none of the bytes in flight to it, as far as earlier calls can
    // tell? -1: none are in flight. A system call, made about once a second. NULL: bytes cannot get lost.
    int64_t (*silence_ns)(struct channel *channel, int64_t now_ns);
};

// One ordered, reliable, two-way byte pipe to one peer.
struct channel {
    const struct channel_ops *ops;
    int fd;                             // tcp: the socket; else -1
    int64_t unanswered_since_ns;        // tcp: for silence_ns; 0: no bytes were in flight
    uint32_t registered;                // tcp: events for which it is registered (poller.h),
    bool has_input;                     // and it has reported input
    struct ring *tx, *rx;               // rings
    size_t capacity;
    struct doorbell *peer_doorbell;
    struct mpi_pipe *pipe;              // mpi
    bool no_wakeup;                     // the data being sent now need not wake an idle peer (shm_segment.h)
};

extern const struct channel_ops channel_ring_ops, channel_tcp_ops, channel_mpi_ops;

// Of a ring: moves at most `size` bytes and returns how many; 0: full, or empty.
size_t ring_write(struct ring *ring, size_t capacity, const void *src, size_t size);
size_t ring_read(struct ring *ring, size_t capacity, void *dst, size_t size);
