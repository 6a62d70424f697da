#include "transport/poller.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>

// The source of an event: the link's rank, and one of its descriptors. DATA + i is data channel i.
enum descriptor { LIVENESS, CONTROL, DATA };

static uint64_t name_of(const struct link *link, int descriptor) { return (uint64_t)link->rank << 8 | (unsigned)descriptor; }

// *registered: the events for which the descriptor is registered.
static bool set_events(struct poller *poller, const struct link *link, int descriptor, int fd, uint32_t *registered,
                       uint32_t events)
{
    if (fd < 0 || *registered == events)
        return true;
    struct epoll_event event = {.events = events, .data.u64 = name_of(link, descriptor)};
    // Without events it would still report its end, again and again: remove it.
    if (epoll_ctl(poller->fd, !*registered ? EPOLL_CTL_ADD : !events ? EPOLL_CTL_DEL : EPOLL_CTL_MOD, fd, &event))
        return false;
    *registered = events;
    return true;
}

static bool has_unmatched_header(const struct data_channel *data)
{
    return data->incoming_moved == sizeof data->incoming && !data->receiving;
}

static bool over_sockets(const struct link *link) { return link->data_channels[0].channel.ops == &channel_tcp_ops; }

bhvd_status poller_update(struct poller *poller, struct link *link)
{
    const bool is_open = link->state == LINK_OPEN;
    bool done = set_events(poller, link, LIVENESS, link->liveness_fd, &link->liveness_registered,
                           is_open ? EPOLLIN | EPOLLRDHUP : 0);
    done &= set_events(poller, link, CONTROL, link->control.fd, &link->control.registered,
                       is_open ? EPOLLIN | (link->control_out.size ? EPOLLOUT : 0) : 0);
    link->is_blocked = false;
    for (int i = 0; i < link->data_channel_count && over_sockets(link); i++) {
        struct data_channel *data = &link->data_channels[i];
        const bool listens = data_channel_wants_input(link, data) ||
                             (is_open && !data->channel.has_input && !has_unmatched_header(data));
        data->channel.has_input = false;
        link->is_blocked |= !listens || has_unmatched_header(data);
        done &= set_events(poller, link, DATA + i, data->channel.fd, &data->channel.registered,
                           (listens ? EPOLLIN : 0) | (is_open && data_channel_has_output(link, data) ? EPOLLOUT : 0));
    }
    if (link->is_blocked && !link->is_in_blocked_list) {
        link->is_in_blocked_list = true;
        poller->blocked[poller->blocked_count++] = link;
    }
    return done ? BHVD_OK : BHVD_ERR_SYSTEM;
}

// Unexpected messages may be expected by now.
static void requeue_blocked(struct poller *poller)
{
    int kept = 0;
    for (int i = 0; i < poller->blocked_count; i++) {
        struct link *link = poller->blocked[i];
        link->is_in_blocked_list = link->is_blocked;
        if (!link->is_blocked)
            continue;
        poller->blocked[kept++] = link;
        for (int s = 0; s < link->data_channel_count; s++)
            if (data_channel_wants_input(link, &link->data_channels[s]))
                link_mark_active(link);
    }
    poller->blocked_count = kept;
}

int poller_check(struct poller *poller, struct link *gone[POLLER_EVENTS])
{
    struct epoll_event events[POLLER_EVENTS];
    int gone_count = 0;
    requeue_blocked(poller);
    const int count = poller->fd < 0 ? 0 : epoll_wait(poller->fd, events, POLLER_EVENTS, 0);
    for (int i = 0; i < count; i++) {
        struct link *link = &poller->links[events[i].data.u64 >> 8];
        const int descriptor = (int)(events[i].data.u64 & 0xff);
        if (descriptor == LIVENESS)
            gone[gone_count++] = link;
        else if (descriptor >= DATA)
            link->data_channels[descriptor - DATA].channel.has_input |= (events[i].events & ~(uint32_t)EPOLLOUT) != 0;
        if (descriptor != LIVENESS)
            link_mark_active(link);
    }
    return gone_count;
}

static bhvd_status poller_all(struct poller *poller, int size, int rank)
{
    bhvd_status status = BHVD_OK;
    for (int other = 0; other < size && !status; other++) {
        struct link *link = &poller->links[other];
        if (other == rank)
            continue;
        if (over_sockets(link)) {
            link->active_links = &poller->active_links;
            poller->socket_count++;
        } else {
            poller->polled[poller->polled_count++] = link;
        }
        poller->liveness_count += link->liveness_fd >= 0;
        const bool is_needed = link->liveness_fd >= 0 || link->control.fd >= 0 || over_sockets(link);
        if (is_needed && poller->fd < 0 && (poller->fd = epoll_create1(EPOLL_CLOEXEC)) < 0)
            return BHVD_ERR_SYSTEM;
        status = poller_update(poller, link);
    }
    return status;
}

bhvd_status poller_init(struct poller *poller, struct link *links, int size, int rank)
{
    *poller = (struct poller){.fd = -1, .links = links};
    poller->polled = malloc((size_t)size * sizeof *poller->polled);
    poller->blocked = malloc((size_t)size * sizeof *poller->blocked);
    errno = ENOMEM;
    bhvd_status status = poller->polled && poller->blocked ? poller_all(poller, size, rank) : BHVD_ERR_SYSTEM;
    if (status) {
        const int failure = errno;
        poller_fini(poller);
        errno = failure;
    }
    return status;
}

void poller_fini(struct poller *poller)
{
    fd_close(&poller->fd);
    free(poller->polled);
    free(poller->blocked);
    *poller = (struct poller){.fd = -1};
}
