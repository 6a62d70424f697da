// A transport moves bytes between two ranks and knows nothing of messages: framing, queues and time limits are in link.c.
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
#include "transport/doorbell.h"
#include "transport/ring.h"

struct channel;

static inline void fd_close(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

// Called by the engine's thread only. Neither call blocks.
struct channel_ops {
    const char *name;
    // Moves what fits now; *moved may be 0. BHVD_ERR_PEER_LOST: the pipe is broken or, for recv, at its end.
    bhvd_status (*send)(struct channel *channel, const struct iovec *parts, int count, size_t *moved);
    bhvd_status (*recv)(struct channel *channel, void *dst, size_t size, size_t *moved);
    // Is there something to read? True on a broken pipe too. Cheap: no system call. NULL: only poll() can tell.
    bool (*readable)(const struct channel *channel);
    bool (*writable)(const struct channel *channel);
    // Have bytes been taken that move on only while this rank looks? Looks. NULL: never.
    bool (*unfinished)(const struct channel *channel);
    // For how long has the peer's host acknowledged none of the bytes that are on their way to it, as far as earlier calls can
    // tell? -1: none are on their way. A system call; asked about once a second. NULL: no byte can get lost on its way.
    int64_t (*silence_ns)(struct channel *channel, int64_t now_ns);
};

// One ordered, reliable, two-way byte pipe to one peer.
struct channel {
    const struct channel_ops *ops;
    int fd;                             // tcp: the socket; else -1
    int64_t unanswered_since_ns;        // tcp: for silence_ns; 0: nothing was on its way
    uint32_t asked;                     // tcp: events that the kernel tells of (poller.h),
    bool told;                          // and it has told of input
    struct ring *tx, *rx;               // rings
    size_t capacity;
    struct doorbell *peer_doorbell;
    struct mpi_pipe *pipe;              // mpi
    bool lazy;                          // what is sent now need not wake an idle peer (doorbell.h)
};

extern const struct channel_ops channel_ring_ops, channel_tcp_ops, channel_mpi_ops;
