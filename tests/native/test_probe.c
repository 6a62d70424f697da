// A line whose bytes are let through at a known rate, measured; what a peer may not say; and what all ranks hear of it.
#include <sys/socket.h>

#include "base/clock.h"
#include "base/thread.h"
#include "core/context/context.h"
#include "job.h"
#include "transport/probe.h"
#include "transport/socket.h"

enum { BYTE_PS = 40000, AT_ONCE = 4096, LIMIT_MS = 60000, TRIES = 50 };

static void connect_pair(int fds[2])
{
    int listener, port;
    struct bhvd_error error;
    CHECK_STATUS(socket_listen("127.0.0.1", 0, 0, &listener, &port, &error), BHVD_OK);
    CHECK_STATUS(socket_connect_begin("127.0.0.1", port, SOCKET_UNSPACED, &fds[0], &error), BHVD_OK);
    CHECK_STATUS(socket_await(fds[0], POLLOUT, clock_deadline_ns(LIMIT_MS)), BHVD_OK);
    CHECK_STATUS(socket_connect_complete(fds[0], "127.0.0.1", port, &error), BHVD_OK);
    CHECK_STATUS(socket_accept(listener, clock_deadline_ns(LIMIT_MS), &fds[1], &error), BHVD_OK);
    close(listener);
}

// A line: what comes in at one end goes out at the other, so many bytes in their time; answers come back at once.
static void *pace(void *arg)
{
    const int *ends = arg;
    unsigned char bytes[AT_ONCE];
    for (int64_t free_ns = 0;;) {
        size_t moved;
        if (socket_read(ends[1], bytes, 4, &moved) || (moved && socket_write_full(ends[0], bytes, moved, CLOCK_NEVER)))
            return NULL;
        if (socket_read(ends[0], bytes, sizeof bytes, &moved))
            return NULL;
        const int64_t now_ns = clock_now_ns();
        free_ns = (free_ns > now_ns ? free_ns : now_ns) + (int64_t)moved * BYTE_PS / 1000;
        while (moved && clock_now_ns() < free_ns)
            usleep(20);
        if (moved && socket_write_full(ends[1], bytes, moved, CLOCK_NEVER))
            return NULL;
    }
}

static void *send_all(void *fd)
{
    CHECK_STATUS(probe_send(*(int *)fd, clock_deadline_ns(LIMIT_MS)), BHVD_OK);
    return NULL;
}

static uint32_t measured_line(void)
{
    int near[2], far[2];
    uint32_t byte_ps = 0;
    pthread_t line, sender;
    connect_pair(near);
    connect_pair(far);
    int ends[] = {near[1], far[0]};
    CHECK_EQ(pthread_create(&line, NULL, pace, ends), 0);
    CHECK_EQ(pthread_create(&sender, NULL, send_all, &near[0]), 0);
    CHECK_STATUS(probe_receive(far[1], 0, clock_deadline_ns(LIMIT_MS), &byte_ps), BHVD_OK);
    pthread_join(sender, NULL);
    close(near[0]);
    close(far[1]);
    pthread_join(line, NULL);
    close(ends[0]);
    close(ends[1]);
    return byte_ps;
}

TEST(a_line_is_measured)
{
    bool found = false;
    // While the machine does something else, the line stands still.
    for (int i = 0; i < TRIES && !found; i++) {
        const uint32_t byte_ps = measured_line();
        found = byte_ps > BYTE_PS * 8 / 10 && byte_ps < BYTE_PS * 2;
    }
    CHECK(found);
}

TEST(a_peer_that_hangs_up_or_sends_more_than_it_was_asked_for_is_lost)
{
    const uint32_t too_much = UINT32_MAX, nothing = 0;
    for (int i = 0; i < 3; i++) {
        int fds[2];
        uint32_t byte_ps;
        connect_pair(fds);
        if (i > 0)
            CHECK_STATUS(socket_write_full(fds[0], i == 1 ? &too_much : &nothing, 4, CLOCK_NEVER), BHVD_OK);
        shutdown(fds[0], SHUT_WR);
        CHECK_STATUS(probe_receive(fds[1], 0, clock_deadline_ns(LIMIT_MS), &byte_ps), BHVD_ERR_PEER_LOST);
        close(fds[0]);
        CHECK_STATUS(probe_send(fds[1], clock_deadline_ns(LIMIT_MS)), BHVD_ERR_PEER_LOST);
        close(fds[1]);
    }
}

// A line to another host is measured, and all choose by the same figures.
static void hears_of_it(struct job *job, int rank, bhvd_context *ctx)
{
    static struct bhvd_measured_network heard[RANKS];
    const struct bhvd_args args = {.kind = BHVD_BARRIER, .name = "agrees", .prescale_factor = 1.0, .postscale_factor = 1.0,
                                   .device = -1};
    struct bhvd_error error;
    bhvd_handle *handle;
    bhvd_context_network(ctx, &heard[rank]);
    CHECK(heard[rank].bytes_per_s == 0);
    CHECK_STATUS(bhvd_post(ctx, &args, &handle, &error), BHVD_OK);
    finish(handle, BHVD_OK);
    bhvd_context_network(ctx, &heard[rank]);
    atomic_fetch_add(&job->ready, 1);
    while (atomic_load(&job->ready) < RANKS)
        usleep(1000);
    CHECK_EQ(heard[rank].bytes_per_s > 0, job->hosts != NULL);
    CHECK(heard[rank].bytes_per_s == heard[0].bytes_per_s && heard[rank].latency_s == heard[0].latency_s);
}

TEST(all_ranks_hear_what_was_measured)
{
    run_job("auto", "", "AAB", hears_of_it);
    run_job("auto", "", NULL, hears_of_it);
}
