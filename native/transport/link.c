#include "transport/link.h"

#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

enum { FRAME_HEADER = 5 };                      // u32 payload size, u8 type

static void queue_init(struct transfer_queue *queue)
{
    queue->head = NULL;
    queue->tail = &queue->head;
}

void link_init(struct link *link, int rank)
{
    *link = (struct link){.rank = rank, .local_index = -1, .bell = {.fd = -1}, .liveness_fd = -1};
    link->control.fd = -1;
    link->stream_count = 1;
    for (int i = 0; i < LINK_STREAMS_MAX; i++) {
        link->streams[i].channel.fd = -1;
        queue_init(&link->streams[i].sends);
        queue_init(&link->streams[i].receives);
    }
}

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

void link_close(struct link *link)
{
    close_fd(&link->control.fd);
    for (int i = 0; i < LINK_STREAMS_MAX; i++)
        close_fd(&link->streams[i].channel.fd);
    close_fd(&link->liveness_fd);
    close_fd(&link->bell.fd);
}

void link_fini(struct link *link)
{
    link_close(link);
    bytes_fini(&link->control_out);
    bytes_fini(&link->control_in);
}

static bhvd_status flush_control(struct link *link, bool *progress)
{
    while (link->control_out.size) {
        struct iovec part = {link->control_out.data + link->control_flushed,
                             link->control_out.size - link->control_flushed};
        size_t moved;
        bhvd_status status = link->control.ops->send(&link->control, &part, 1, &moved);
        if (status || moved == 0)
            return status;
        *progress = true;
        link->control_flushed += moved;
        if (link->control_flushed == link->control_out.size)
            link->control_out.size = link->control_flushed = 0;
    }
    return BHVD_OK;
}

bhvd_status link_send_frame(struct link *link, uint8_t type, const struct bytes *payload, bool lazy)
{
    bool progress;
    if (payload->failed || payload->size > LINK_FRAME_MAX)
        return BHVD_ERR_SYSTEM;
    bytes_put_u32(&link->control_out, (uint32_t)payload->size);
    bytes_put_u8(&link->control_out, type);
    bytes_put(&link->control_out, payload->data, payload->size);
    if (link->control_out.failed)
        return BHVD_ERR_SYSTEM;
    link->control_sent += FRAME_HEADER + payload->size;
    link->control.lazy = lazy;
    bhvd_status status = flush_control(link, &progress);
    link->control.lazy = false;
    return status;
}

static void queue_append(struct transfer_queue *queue, struct transfer *transfer, void *buffer, size_t size,
                         struct traffic *traffic)
{
    *transfer = (struct transfer){
        .buffer = buffer, .size = size, .header = {.number = traffic->posted++, .size = size}};
    *queue->tail = transfer;
    queue->tail = &transfer->next;
}

static void queue_pop(struct transfer_queue *queue, struct traffic *traffic)
{
    struct transfer *transfer = queue->head;
    queue->head = transfer->next;
    if (!queue->head)
        queue->tail = &queue->head;
    traffic->done++;
    transfer->done = true;
}

void link_post_send(struct link *link, struct transfer *transfer, const void *buffer, size_t size)
{
    struct stream *stream = &link->streams[link->sends.posted % (unsigned)link->stream_count];
    queue_append(&stream->sends, transfer, (void *)buffer, size, &link->sends);
}

void link_post_recv(struct link *link, struct transfer *transfer, void *buffer, size_t size)
{
    struct stream *stream = &link->streams[link->receives.posted % (unsigned)link->stream_count];
    queue_append(&stream->receives, transfer, buffer, size, &link->receives);
}

static bhvd_status advance_sends(struct link *link, struct stream *stream, bool *progress)
{
    struct transfer *t;
    while ((t = stream->sends.head)) {
        size_t moved, header_left = sizeof t->header - t->header_moved;
        struct iovec parts[2] = {
            {(char *)&t->header + t->header_moved, header_left},
            {t->buffer + t->moved, t->size - t->moved},
        };
        bool both = header_left && t->size;
        bhvd_status status =
            stream->channel.ops->send(&stream->channel, header_left ? parts : parts + 1, both ? 2 : 1, &moved);
        if (status)
            return status;
        if (moved)
            *progress = true;
        size_t of_header = moved < header_left ? moved : header_left;
        t->header_moved += of_header;
        t->moved += moved - of_header;
        link->payload_sent += moved - of_header;
        if (t->header_moved < sizeof t->header || t->moved < t->size)
            return BHVD_OK;
        queue_pop(&stream->sends, &link->sends);
    }
    return BHVD_OK;
}

static bhvd_status advance_receives(struct link *link, struct stream *stream, bool *progress)
{
    struct channel *channel = &stream->channel;
    struct transfer *t;
    while ((t = stream->receives.head)) {
        size_t moved;
        // While the header is incomplete its expected content lies in t->header; what arrives is compared with it.
        while (t->header_moved < sizeof t->header) {
            unsigned char got[sizeof t->header];
            bhvd_status status = channel->ops->recv(channel, got, sizeof got - t->header_moved, &moved);
            if (status || moved == 0)
                return status;
            *progress = true;
            if (memcmp((char *)&t->header + t->header_moved, got, moved) != 0)
                return BHVD_ERR_SYSTEM;
            t->header_moved += moved;
        }
        while (t->moved < t->size) {
            bhvd_status status = channel->ops->recv(channel, t->buffer + t->moved, t->size - t->moved, &moved);
            if (status || moved == 0)
                return status;
            *progress = true;
            t->moved += moved;
            link->payload_received += moved;
        }
        queue_pop(&stream->receives, &link->receives);
    }
    return BHVD_OK;
}

static bhvd_status advance_all_receives(struct link *link, bool *progress)
{
    bhvd_status status = BHVD_OK;
    for (int i = 0; i < link->stream_count && !status && traffic_is_pending(&link->receives); i++)
        status = advance_receives(link, &link->streams[i], progress);
    return status;
}

static bhvd_status advance_control(struct link *link, link_frame_fn on_frame, void *arg, bool *progress)
{
    for (;;) {
        unsigned char chunk[4096];
        size_t moved;
        bhvd_status status = link->control.ops->recv(&link->control, chunk, sizeof chunk, &moved);
        if (status || moved == 0)
            return status;
        *progress = true;
        bytes_put(&link->control_in, chunk, moved);
        if (link->control_in.failed)
            return BHVD_ERR_SYSTEM;
        size_t used = 0;
        while (link->control_in.size - used >= FRAME_HEADER) {
            const unsigned char *frame = link->control_in.data + used;
            uint32_t size;
            memcpy(&size, frame, sizeof size);
            if (size > LINK_FRAME_MAX)
                return BHVD_ERR_SYSTEM;
            if (link->control_in.size - used < FRAME_HEADER + (size_t)size)
                break;
            const unsigned char *payload = frame + FRAME_HEADER;
            used += FRAME_HEADER + (size_t)size;
            link->frames_received++;
            status = on_frame(arg, link, frame[4], (struct bytes_reader){payload, payload + size, false});
            if (status)
                return status;
        }
        bytes_shift(&link->control_in, used);
    }
}

bhvd_status link_advance(struct link *link, link_frame_fn on_frame, void *arg, bool *progress)
{
    bhvd_status status = BHVD_OK;
    if (link->state != LINK_OPEN) {
        // It is gone, but what it sent before lies in the ring or the socket still.
        return advance_all_receives(link, progress);
    }
    if (link->control_out.size)
        status = flush_control(link, progress);
    for (int i = 0; i < link->stream_count && !status && traffic_is_pending(&link->sends); i++)
        status = advance_sends(link, &link->streams[i], progress);
    if (!status)
        status = advance_all_receives(link, progress);
    // Last, so that a goodbye is seen after the data that came before it; and also when the data channel broke, because
    // the goodbye may explain it.
    if ((!status || status == BHVD_ERR_PEER_LOST) &&
        (!link->control.ops->readable || link->control.ops->readable(&link->control))) {
        bhvd_status control = advance_control(link, on_frame, arg, progress);
        status = status ? status : control;
    }
    if (status == BHVD_ERR_PEER_LOST) {
        if (link->state == LINK_LEFT)
            return BHVD_OK;
        link->state = LINK_LOST;
    }
    return status;
}

void link_hang_up(struct link *link, link_frame_fn on_frame, void *arg, bool *progress)
{
    if (link_advance(link, on_frame, arg, progress) || link->state == LINK_OPEN)
        link->state = link->state == LINK_LEFT ? LINK_LEFT : LINK_LOST;
}

bhvd_status link_flush(struct link *link)
{
    bool progress;
    return flush_control(link, &progress);
}

bool link_ready(const struct link *link)
{
    if (link->control.ops->readable && link->state == LINK_OPEN && link->control.ops->readable(&link->control))
        return true;
    if (link->control_out.size && link->control.ops->writable && link->control.ops->writable(&link->control))
        return true;
    for (int i = 0; i < link->stream_count; i++) {
        const struct stream *stream = &link->streams[i];
        const struct channel_ops *ops = stream->channel.ops;
        if ((stream->sends.head && ops->writable && ops->writable(&stream->channel)) ||
            (stream->receives.head && ops->readable && ops->readable(&stream->channel)))
            return true;
    }
    return false;
}

bool link_needs_looking(const struct link *link)
{
    for (int i = 0; i < link->stream_count; i++) {
        const struct stream *stream = &link->streams[i];
        const struct channel_ops *ops = stream->channel.ops;
        // A peer that has left needs no more bytes, but may have sent some.
        if (ops && ops->unfinished && (stream->sends.head || stream->receives.head ||
                                       (link->state == LINK_OPEN && ops->unfinished(&stream->channel))))
            return true;
    }
    return false;
}

static void look_at_silence(struct channel *channel, int64_t now_ns, int64_t *longest_ns)
{
    int64_t silence_ns = channel->ops && channel->ops->silence_ns ? channel->ops->silence_ns(channel, now_ns) : -1;
    if (*longest_ns < silence_ns)
        *longest_ns = silence_ns;
}

int64_t link_silence_ns(struct link *link, int64_t now_ns)
{
    int64_t longest_ns = -1;
    look_at_silence(&link->control, now_ns, &longest_ns);
    for (int i = 0; i < link->stream_count; i++)
        look_at_silence(&link->streams[i].channel, now_ns, &longest_ns);
    return longest_ns;
}
