#include "transport/watch.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

// What an event is about: the link's rank, and which of its descriptors. STREAM + i is stream i.
enum descriptor { LIVENESS, CONTROL, STREAM };

static uint64_t name_of(const struct link *link, int descriptor) { return (uint64_t)link->rank << 8 | (unsigned)descriptor; }

// *asked: of which events the kernel tells already.
static bool ask(struct watch *watch, const struct link *link, int descriptor, int fd, uint32_t *asked, uint32_t events)
{
    if (fd < 0 || *asked == events)
        return true;
    struct epoll_event event = {.events = events, .data.u64 = name_of(link, descriptor)};
    // One without events would still tell of its end, again and again.
    if (epoll_ctl(watch->fd, !*asked ? EPOLL_CTL_ADD : !events ? EPOLL_CTL_DEL : EPOLL_CTL_MOD, fd, &event))
        return false;
    *asked = events;
    return true;
}

static bool is_held(const struct stream *stream)
{
    return stream->incoming_moved == sizeof stream->incoming && !stream->receiving;
}

static bool over_sockets(const struct link *link) { return link->streams[0].channel.ops == &channel_tcp_ops; }

bhvd_status watch_update(struct watch *watch, struct link *link)
{
    const bool is_open = link->state == LINK_OPEN;
    bool done = ask(watch, link, LIVENESS, link->liveness_fd, &link->liveness_asked, is_open ? EPOLLIN | EPOLLRDHUP : 0);
    done &= ask(watch, link, CONTROL, link->control.fd, &link->control.asked,
                is_open ? EPOLLIN | (link->control_out.size ? EPOLLOUT : 0) : 0);
    link->is_deaf = false;
    for (int i = 0; i < link->stream_count && over_sockets(link); i++) {
        struct stream *stream = &link->streams[i];
        const bool listens = stream_wants_input(link, stream) || (is_open && !stream->channel.told && !is_held(stream));
        stream->channel.told = false;
        link->is_deaf |= !listens || is_held(stream);
        done &= ask(watch, link, STREAM + i, stream->channel.fd, &stream->channel.asked,
                    (listens ? EPOLLIN : 0) | (is_open && stream_has_output(stream) ? EPOLLOUT : 0));
    }
    if (link->is_deaf && !link->is_listed) {
        link->is_listed = true;
        watch->deaf[watch->deaf_count++] = link;
    }
    return done ? BHVD_OK : BHVD_ERR_SYSTEM;
}

// What was not expected may be by now.
static void note_deaf(struct watch *watch)
{
    int kept = 0;
    for (int i = 0; i < watch->deaf_count; i++) {
        struct link *link = watch->deaf[i];
        link->is_listed = link->is_deaf;
        if (!link->is_deaf)
            continue;
        watch->deaf[kept++] = link;
        for (int s = 0; s < link->stream_count; s++)
            if (stream_wants_input(link, &link->streams[s]))
                link_note(link);
    }
    watch->deaf_count = kept;
}

int watch_look(struct watch *watch, struct link *gone[WATCH_EVENTS])
{
    struct epoll_event events[WATCH_EVENTS];
    int gone_count = 0;
    note_deaf(watch);
    const int count = watch->fd < 0 ? 0 : epoll_wait(watch->fd, events, WATCH_EVENTS, 0);
    for (int i = 0; i < count; i++) {
        struct link *link = &watch->links[events[i].data.u64 >> 8];
        const int descriptor = (int)(events[i].data.u64 & 0xff);
        if (descriptor == LIVENESS)
            gone[gone_count++] = link;
        else if (descriptor >= STREAM)
            link->streams[descriptor - STREAM].channel.told |= (events[i].events & ~(uint32_t)EPOLLOUT) != 0;
        if (descriptor != LIVENESS)
            link_note(link);
    }
    return gone_count;
}

static bhvd_status watch_all(struct watch *watch, int size, int rank)
{
    bhvd_status status = BHVD_OK;
    for (int other = 0; other < size && !status; other++) {
        struct link *link = &watch->links[other];
        if (other == rank)
            continue;
        if (over_sockets(link)) {
            link->due = &watch->due;
            watch->socket_count++;
        } else {
            watch->walked[watch->walked_count++] = link;
        }
        watch->liveness_count += link->liveness_fd >= 0;
        if (watch->fd < 0 && (link->liveness_fd >= 0 || link->control.fd >= 0 || over_sockets(link)))
            watch->fd = epoll_create1(EPOLL_CLOEXEC);
        status = watch_update(watch, link);
    }
    return status;
}

bhvd_status watch_init(struct watch *watch, struct link *links, int size, int rank)
{
    *watch = (struct watch){.fd = -1, .links = links};
    watch->due.tail = &watch->due.head;
    watch->walked = malloc((size_t)size * sizeof *watch->walked);
    watch->deaf = malloc((size_t)size * sizeof *watch->deaf);
    errno = ENOMEM;
    bhvd_status status = watch->walked && watch->deaf ? watch_all(watch, size, rank) : BHVD_ERR_SYSTEM;
    if (status) {
        const int failure = errno;
        watch_fini(watch);
        errno = failure;
    }
    return status;
}

void watch_close(struct watch *watch)
{
    if (watch->fd >= 0)
        close(watch->fd);
    watch->fd = -1;
}

void watch_fini(struct watch *watch)
{
    watch_close(watch);
    free(watch->walked);
    free(watch->deaf);
    *watch = (struct watch){.fd = -1};
}
