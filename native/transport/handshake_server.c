#include "transport/handshake_server.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/clock.h"
#include "transport/channel.h"
#include "transport/socket.h"

enum {
    ACCEPT_BATCH = 64,          // connections accepted at a time, before existing ones are served
    ACCEPT_PAUSE_MS = 100       // when out of descriptors
};

struct stranger {
    int fd, listener;
    int64_t deadline_ns;
    size_t moved;               // bytes of the introduction
    struct introduction introduction;
};

struct handshake_server {
    int listeners[HANDSHAKE_LISTENERS];
    int64_t accept_again_ns;
    int64_t lacking_since_ns;   // since when descriptors or memory are lacking; 0: they are not
    int unserved;               // strangers that were polled and not yet handled
    int count;
    struct stranger strangers[HANDSHAKE_STRANGERS_MAX];     // in order of arrival
};

struct handshake_server *handshake_server_create(const int listeners[HANDSHAKE_LISTENERS])
{
    struct handshake_server *handshakes = calloc(1, sizeof *handshakes);
    if (handshakes)
        memcpy(handshakes->listeners, listeners, sizeof handshakes->listeners);
    return handshakes;
}

static void forget(struct handshake_server *handshakes, int index)
{
    handshakes->count--;
    memmove(handshakes->strangers + index, handshakes->strangers + index + 1,
            (size_t)(handshakes->count - index) * sizeof handshakes->strangers[0]);
}

static void drop(struct handshake_server *handshakes, int index)
{
    const int fd = handshakes->strangers[index].fd;
    forget(handshakes, index);
    close(fd);
}

void handshake_server_destroy(struct handshake_server *handshakes)
{
    while (handshakes && handshakes->count)
        drop(handshakes, handshakes->count - 1);
    free(handshakes);
}

void handshake_server_after_fork(struct handshake_server *handshakes)
{
    for (int i = 0; i < handshakes->count; i++)
        fd_close(&handshakes->strangers[i].fd);
}

// Drops a random stranger. False: there is none.
static bool evict_one(struct handshake_server *handshakes)
{
    unsigned random = 0;
    if (!handshakes->count)
        return false;
    (void)!getrandom(&random, sizeof random, GRND_NONBLOCK);
    drop(handshakes, (int)(random % (unsigned)handshakes->count));
    return true;
}

// Out of descriptors or memory, with no stranger to evict.
static bhvd_status pause_accepting(struct handshake_server *handshakes)
{
    const int64_t now_ns = clock_now_ns();
    const int failure = errno;
    handshakes->accept_again_ns = now_ns + clock_ms_ns(ACCEPT_PAUSE_MS);
    if (!handshakes->lacking_since_ns)
        handshakes->lacking_since_ns = now_ns;
    errno = failure;
    return now_ns - handshakes->lacking_since_ns >= clock_ms_ns(HANDSHAKE_LACKING_MS) ? BHVD_ERR_SYSTEM : BHVD_OK;
}

static bhvd_status accept_some(struct handshake_server *handshakes, int listener)
{
    for (int i = 0; i < ACCEPT_BATCH; i++) {
        int fd;
        bhvd_status status = socket_accept(handshakes->listeners[listener], &fd);
        if (status == BHVD_ERR_TIMEOUT)
            break;
        if (status && !evict_one(handshakes))
            return pause_accepting(handshakes);
        if (status)
            continue;
        handshakes->lacking_since_ns = 0;
        if (listener == HANDSHAKE_LOCAL && !socket_is_of_this_user(fd)) {
            close(fd);
            continue;
        }
        if (handshakes->count == HANDSHAKE_STRANGERS_MAX)
            evict_one(handshakes);
        handshakes->strangers[handshakes->count++] =
            (struct stranger){.fd = fd, .listener = listener, .deadline_ns = clock_deadline_ns(HANDSHAKE_STRANGER_MS)};
    }
    return BHVD_OK;
}

int handshake_server_poll(struct handshake_server *handshakes, struct pollfd *polls, int64_t *wake_ns)
{
    const bool accepts = handshakes->accept_again_ns <= clock_now_ns();
    const int64_t due_ns = handshakes->count ? handshakes->strangers[0].deadline_ns : CLOCK_NEVER;
    for (int i = 0; i < HANDSHAKE_LISTENERS; i++)
        polls[i] = (struct pollfd){.fd = accepts ? handshakes->listeners[i] : -1, .events = POLLIN};
    for (int i = 0; i < handshakes->count; i++)
        polls[HANDSHAKE_LISTENERS + i] = (struct pollfd){.fd = handshakes->strangers[i].fd, .events = POLLIN};
    handshakes->unserved = handshakes->count;
    *wake_ns = due_ns < *wake_ns ? due_ns : *wake_ns;
    if (!accepts && handshakes->accept_again_ns < *wake_ns)
        *wake_ns = handshakes->accept_again_ns;
    return HANDSHAKE_LISTENERS + handshakes->count;
}

bhvd_status handshake_server_next(struct handshake_server *handshakes, struct pollfd *polls, struct introduced *out)
{
    const int64_t now_ns = clock_now_ns();
    // In descending order, so that a removal does not move the strangers that are still to be served.
    while (handshakes->unserved > 0) {
        const int i = --handshakes->unserved;
        struct stranger *s = &handshakes->strangers[i];
        const bhvd_status status = polls[HANDSHAKE_LISTENERS + i].revents
                                       ? socket_read_part(s->fd, &s->introduction, sizeof s->introduction, &s->moved)
                                       : BHVD_IN_PROGRESS;
        if (!status) {
            *out = (struct introduced){s->fd, s->listener, s->introduction};
            forget(handshakes, i);
            return BHVD_OK;
        }
        if (status != BHVD_IN_PROGRESS || s->deadline_ns <= now_ns)
            drop(handshakes, i);
    }
    for (int i = 0; i < HANDSHAKE_LISTENERS; i++) {
        bhvd_status status = polls[i].revents ? accept_some(handshakes, i) : BHVD_OK;
        polls[i].revents = 0;
        if (status)
            return status;
    }
    return BHVD_ERR_TIMEOUT;
}
