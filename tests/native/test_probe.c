// Measuring a link of known rate; invalid messages of a peer; and the result on all ranks.
#include <dlfcn.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "base/thread.h"
#include "core/context/context.h"
#include "job.h"
#include "transport/connect.h"
#include "transport/socket.h"

enum { BYTE_PS = 40000, LIMIT_MS = 60000, KNOWN = 12500000 };

static void connect_pair(int fds[2])
{
    int listener, port;
    struct bhvd_error error;
    CHECK_STATUS(socket_listen("127.0.0.1", 0, 0, &listener, &port, &error), BHVD_OK);
    CHECK_STATUS(socket_connect_begin("127.0.0.1", port, SOCKET_UNSPACED, &fds[0], &error), BHVD_OK);
    CHECK_STATUS(socket_await(fds[0], POLLOUT, clock_deadline_ns(LIMIT_MS)), BHVD_OK);
    CHECK_STATUS(socket_connect_complete(fds[0], "127.0.0.1", port, &error), BHVD_OK);
    CHECK_STATUS(socket_await(listener, POLLIN, clock_deadline_ns(LIMIT_MS)), BHVD_OK);
    CHECK_STATUS(socket_accept(listener, &fds[1]), BHVD_OK);
    close(listener);
}

// The link's own clock, which recvmsg() reports as the kernel's: it advances with the bytes, so a busy machine has no effect.
static struct {
    int64_t now_ns, pause_ns;       // before every second piece; now_ns of 0: no link
    int pieces;
} line;

ssize_t recvmsg(int fd, struct msghdr *message, int flags)
{
    ssize_t (*original)(int, struct msghdr *, int);
    *(void **)&original = dlsym(RTLD_NEXT, "recvmsg");
    const ssize_t n = original(fd, message, flags);
    if (n > 0 && line.now_ns) {
        line.now_ns += n * BYTE_PS / 1000 + (line.pieces++ % 2 ? line.pause_ns : 0);
        message->msg_controllen = CMSG_SPACE(sizeof(struct timespec));
        struct cmsghdr *header = CMSG_FIRSTHDR(message);
        *header = (struct cmsghdr){CMSG_LEN(sizeof(struct timespec)), SOL_SOCKET, SCM_TIMESTAMPNS};
        memcpy(CMSG_DATA(header), &(struct timespec){line.now_ns / 1000000000, line.now_ns % 1000000000},
               sizeof(struct timespec));
    }
    return n;
}

static void *send_all(void *fd)
{
    CHECK_STATUS(probe_send(*(int *)fd, clock_deadline_ns(LIMIT_MS)), BHVD_OK);
    return NULL;
}

static uint32_t measured_line(int64_t round_trip_ns, int64_t pause_ns)
{
    int fds[2];
    uint32_t beta_ps = 0;
    pthread_t sender;
    connect_pair(fds);
    CHECK_EQ(pthread_create(&sender, NULL, send_all, &fds[0]), 0);
    line.now_ns = 1;
    line.pause_ns = pause_ns;
    CHECK_STATUS(probe_receive(fds[1], round_trip_ns, clock_deadline_ns(LIMIT_MS), &beta_ps), BHVD_OK);
    line.now_ns = 0;
    pthread_join(sender, NULL);
    close(fds[0]);
    close(fds[1]);
    return beta_ps;
}

TEST(a_line_is_measured)
{
    CHECK_EQ(measured_line(0, 0), BYTE_PS);
    // Pauses count for a near peer, but not for a distant one.
    CHECK_EQ(measured_line(20000000, 3000000), BYTE_PS);
    CHECK(measured_line(0, 3000000) > 2 * BYTE_PS);
}

TEST(a_peer_that_hangs_up_or_sends_more_than_it_was_asked_for_is_lost)
{
    const uint32_t too_much = UINT32_MAX, nothing = 0;
    for (int i = 0; i < 3; i++) {
        int fds[2];
        uint32_t beta_ps = 0;
        connect_pair(fds);
        if (i > 0)
            CHECK_STATUS(socket_write_full(fds[0], i == 1 ? &too_much : &nothing, 4, CLOCK_NEVER), BHVD_OK);
        shutdown(fds[0], SHUT_WR);
        CHECK_STATUS(probe_receive(fds[1], 0, clock_deadline_ns(LIMIT_MS), &beta_ps), BHVD_ERR_PEER_LOST);
        close(fds[0]);
        CHECK_STATUS(probe_send(fds[1], clock_deadline_ns(LIMIT_MS)), BHVD_ERR_PEER_LOST);
        close(fds[1]);
    }
}

// A link to another host is measured, and all ranks use the same figures.
static void hears_of_it(struct job *job, int rank, bhvd_context *ctx)
{
    static struct bhvd_measured_network heard[RANKS];
    bhvd_context_network(ctx, &heard[rank]);
    CHECK(heard[rank].bytes_per_s == 0);
    finish(post_barrier(ctx, "agrees"), BHVD_OK);
    bhvd_context_network(ctx, &heard[rank]);
    atomic_fetch_add(&job->ready, 1);
    while (atomic_load(&job->ready) < RANKS)
        usleep(1000);
    CHECK_EQ(heard[rank].bytes_per_s > 0, job->hosts != NULL);
    CHECK(heard[rank].bytes_per_s == heard[0].bytes_per_s && heard[rank].latency_s == heard[0].latency_s);
    if (job->adjust)
        CHECK_EQ((int64_t)(heard[rank].bytes_per_s + 0.5), KNOWN);
}

static void know_it(int rank, struct bhvd_context_options *options) { options->known_bytes_per_s = rank == 0 ? KNOWN : 0; }

TEST(all_ranks_hear_what_was_measured)
{
    run_job("auto", "", "AAB", hears_of_it);
    run_job("auto", "", NULL, hears_of_it);
}

TEST(what_is_known_is_not_measured)
{
    run_this_job(&(struct job){.transport = "auto", .path = "", .hosts = "AAB", .body = hears_of_it, .adjust = know_it});
}
