// Measures the time per byte between two hosts. One side sends trains of bytes, as long as the other side requests, up to the
// number that the kernel sends without waiting for acknowledgements; the other measures how long they take to arrive. The length
// doubles until that is some milliseconds: 5 ms in total at 100 Mbit/s, 8 at 1 Gbit/s, 2 at 10 Gbit/s, and up to five round trips.
#include "transport/connect.h"

#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "base/clock.h"
#include "base/status.h"
#include "transport/socket.h"

enum {
    PROBED = 2,                     // hosts whose lines to rank 0 are measured
    FIRST_NBYTES = 64 << 10,
    LONGEST_NBYTES = 1 << 20,
    STRETCHED_NS = 3000000,         // long enough that jitter of machines and network counts for little
    TIME_LIMIT_NS = 150000000,      // on long round trips: use the measurements made so far
    PAUSES = 8,                     // a pause of at least 1/8 of a long round trip comes from the kernels' initially small windows
    PIECE_NBYTES = 4096             // per read
};

bhvd_status probe_send(int fd, int64_t deadline_ns)
{
    unsigned char *zeros = calloc(1, LONGEST_NBYTES);       // written at once, as large messages are
    bhvd_status status = zeros ? BHVD_OK : BHVD_ERR_SYSTEM;
    for (uint32_t nbytes = 1; nbytes && !status;) {
        status = socket_read_full(fd, &nbytes, sizeof nbytes, deadline_ns);
        const size_t at_once = socket_window(fd);
        if (nbytes > at_once && at_once >= PIECE_NBYTES)
            nbytes = (uint32_t)at_once;
        if (nbytes > LONGEST_NBYTES)
            status = BHVD_ERR_PEER_LOST;
        if (!status && nbytes)
            status = socket_write_full(fd, &nbytes, sizeof nbytes, deadline_ns);
        if (!status && nbytes)
            status = socket_write_full(fd, zeros, nbytes, deadline_ns);
    }
    free(zeros);
    return status;
}

// Arrival time of some bytes: in this process; in the kernel, 0: unknown.
struct moment {
    int64_t here_ns, kernel_ns;
};

// Reads at most nbytes; *moved is at least 1.
static bhvd_status read_piece(int fd, void *dst, size_t nbytes, int64_t deadline_ns, size_t *moved, struct moment *moment)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(struct timespec))];
    } control;
    struct iovec part = {dst, nbytes};
    for (;;) {
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
        const ssize_t n = recvmsg(fd, &message, MSG_DONTWAIT);
        if (n > 0) {
            const struct cmsghdr *header = CMSG_FIRSTHDR(&message);
            *moved = (size_t)n;
            *moment = (struct moment){clock_now_ns(), 0};
            if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_TIMESTAMPNS) {
                struct timespec at;
                memcpy(&at, CMSG_DATA(header), sizeof at);
                moment->kernel_ns = (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
            }
            return BHVD_OK;
        }
        if (n == 0 || (errno != EINTR && errno != EAGAIN))
            return BHVD_ERR_PEER_LOST;
        const bhvd_status status = errno == EAGAIN ? socket_await(fd, POLLIN, deadline_ns) : BHVD_OK;
        if (status)
            return status;
    }
}

static int64_t between(const struct moment *first, const struct moment *last)
{
    return first->kernel_ns && last->kernel_ns ? last->kernel_ns - first->kernel_ns : last->here_ns - first->here_ns;
}

// Bytes received without a pause, and the time they took.
struct stretch {
    int64_t ns;
    uint32_t nbytes;
};

// Bytes that arrive with the train's first probe or after a pause are not counted, since they may have been waiting.
static bhvd_status receive_train(int fd, uint32_t wanted, int64_t pause_ns, int64_t deadline_ns, struct stretch *sum)
{
    unsigned char piece[PIECE_NBYTES];
    struct moment previous, now;
    size_t moved = 0;
    uint32_t sent;
    bhvd_status status = socket_write_full(fd, &wanted, sizeof wanted, deadline_ns);
    if (!status)
        status = read_piece(fd, piece, sizeof sent, deadline_ns, &moved, &previous);
    if (!status && moved < sizeof sent)
        status = socket_read_full(fd, piece + moved, sizeof sent - moved, deadline_ns);
    if (status)
        return status;
    memcpy(&sent, piece, sizeof sent);
    bool counts = false;
    for (uint32_t left = sent <= wanted ? sent : 0; left && !status; left -= (uint32_t)moved) {
        status = read_piece(fd, piece, left < sizeof piece ? left : sizeof piece, deadline_ns, &moved, &now);
        if (status)
            return status;
        const int64_t ns = between(&previous, &now);
        if (ns > 0)
            counts = ns < pause_ns;
        sum->ns += counts && ns > 0 ? ns : 0;
        sum->nbytes += counts ? (uint32_t)moved : 0;
        previous = now;
    }
    return sent && sent <= wanted ? BHVD_OK : BHVD_ERR_PEER_LOST;
}

bhvd_status probe_receive(int fd, int64_t round_trip_ns, int64_t deadline_ns, uint32_t *beta_ps)
{
    const uint32_t enough = 0;
    const int64_t began_ns = clock_now_ns(), pause_ns = round_trip_ns >= SOCKET_FAR_NS ? round_trip_ns / PAUSES : INT64_MAX;
    struct stretch sum = {0};
    bhvd_status status = BHVD_OK;
    if (*beta_ps)
        return socket_write_full(fd, &enough, sizeof enough, deadline_ns);
    setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &(int){1}, sizeof(int));
    for (uint32_t wanted = FIRST_NBYTES; wanted <= LONGEST_NBYTES && !status; wanted *= 2) {
        status = receive_train(fd, wanted, pause_ns, deadline_ns, &sum);
        if (sum.ns >= STRETCHED_NS || clock_now_ns() - began_ns >= TIME_LIMIT_NS)
            break;
    }
    setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &(int){0}, sizeof(int));
    const double ps = !status && sum.nbytes ? (double)sum.ns * 1000 / sum.nbytes : 0;
    *beta_ps = ps < UINT32_MAX ? (uint32_t)ps : UINT32_MAX;
    return status ? status : socket_write_full(fd, &enough, sizeof enough, deadline_ns);
}

static int first_rank_of(const struct connections *c, int host)
{
    int rank = 0;
    while (c->host_of[rank] != host)
        rank++;
    return rank;
}

// The first ranks of PROBED hosts send and rank 0 measures, one after the other: the time does not grow with the number of hosts.
bhvd_status probe_lines(struct connecting *k)
{
    struct connections *c = k->c;
    const int64_t known = k->options->known_bytes_per_s, known_ps = known > 0 ? (int64_t)1e12 / known : 0;
    bhvd_status status = BHVD_OK;
    int hosts = 0;
    for (int rank = 0; rank < c->size; rank++)
        hosts = c->host_of[rank] >= hosts ? c->host_of[rank] + 1 : hosts;
    for (int i = 0, last = 0; i < PROBED && !status; i++) {
        const int host = (int)((int64_t)(hosts - 1) * (i + 1) / PROBED), rank = first_rank_of(c, host);
        uint32_t beta_ps = known_ps < UINT32_MAX ? (uint32_t)known_ps : UINT32_MAX;
        if (host == last)
            continue;
        last = host;
        if (c->rank == 0)
            status = probe_receive(c->links[rank].control.fd, c->links[rank].round_trip_ns, k->deadline_ns, &beta_ps);
        else if (c->rank == rank)
            status = probe_send(c->links[0].control.fd, k->deadline_ns);
        c->beta_ps = c->beta_ps < beta_ps ? beta_ps : c->beta_ps;
        if (status)
            error_set(k->error, status, "the connection between rank 0 and rank %d broke while it was measured", rank);
    }
    return status;
}
