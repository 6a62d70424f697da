// What an engine sleeps on.
#include <poll.h>
#include <stdlib.h>

#include "check.h"
#include "run/pause.h"

static bool sleeps_on(const struct run *run, int fd, short events)
{
    struct pollfd *fds = pause_fds_create(run);
    const int count = pause_fill_fds((struct run *)run, fds);
    bool found = false;
    for (int i = 0; i < count; i++)
        found |= fds[i].fd == fd && fds[i].events == events;
    free(fds);
    return found;
}

// Else they would be noticed with the next heartbeat, up to a second later.
TEST(the_last_messages_of_a_rank_that_has_left_wake_the_engine)
{
    enum { CONTROL = 11, FIRST = 12, SECOND = 13 };
    struct run *run = calloc(1, sizeof *run);
    struct transfer transfer, send;
    char buffer[8];
    run->connections.size = 2;
    run->connections.links = calloc(2, sizeof *run->connections.links);
    for (int i = 0; i < 2; i++)
        link_init(&run->connections.links[i], i, &run->connections.started);
    struct link *link = &run->connections.links[1];
    link->control.fd = CONTROL;
    link->stream_count = 2;
    link->streams[0].channel.fd = FIRST;
    link->streams[1].channel.fd = SECOND;
    link_post_recv(link, 0, &transfer, buffer, sizeof buffer);
    link_post_send(link, 0, &send, buffer, sizeof buffer);
    CHECK(sleeps_on(run, CONTROL, POLLIN) && sleeps_on(run, FIRST, POLLIN | POLLOUT));
    link->state = LINK_LEFT;
    CHECK(sleeps_on(run, FIRST, POLLIN) && sleeps_on(run, SECOND, POLLIN));
    CHECK(!sleeps_on(run, CONTROL, POLLIN));
    link->state = LINK_LOST;
    CHECK(!sleeps_on(run, FIRST, POLLIN) && !sleeps_on(run, SECOND, POLLIN));
    free(run->connections.links);
    free(run);
}
