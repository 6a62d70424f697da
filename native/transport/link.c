#include "transport/link.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/status.h"

enum {
    FRAME_HEADER = 5,                           // u32 payload size, u8 type
    EXPLANATION_NS = 2000000000
};

void link_mark_active(struct link *link)
{
    if (!link->active_links || link->is_queued)
        return;
    link->is_queued = true;
    fifo_put(link->active_links, link, next_ready);
}

struct link *link_queue_pop(struct link_queue *queue)
{
    struct link *link = fifo_take(queue, next_ready);
    if (link)
        link->is_queued = false;
    return link;
}

void link_init(struct link *link, int rank, const uint64_t *started)
{
    *link = (struct link){.rank = rank, .local_index = -1, .doorbell = {.fd = -1}, .liveness_fd = -1, .started = started};
    link->control.fd = -1;
    link->data_channel_count = 1;
    for (int i = 0; i < LINK_DATA_CHANNELS_MAX; i++) {
        link->data_channels[i].channel.fd = -1;
    }
    for (uint32_t i = 0; i < LINK_MATCH_QUEUES; i++)
        link->queues[i] = (struct match_queue){.execution = i};
}

void link_close(struct link *link)
{
    fd_close(&link->control.fd);
    for (int i = 0; i < LINK_DATA_CHANNELS_MAX; i++)
        fd_close(&link->data_channels[i].channel.fd);
    fd_close(&link->liveness_fd);
    fd_close(&link->doorbell.fd);
}

static void free_unexpected(struct match_queue *queue)
{
    for (struct transfer *unexpected; (unexpected = fifo_take(&queue->unexpected, next));)
        free(unexpected);
}

void link_fini(struct link *link)
{
    link_close(link);
    for (int i = 0; i < LINK_MATCH_QUEUES; i++)
        free_unexpected(&link->queues[i]);
    for (struct match_queue *queue = link->pairwise, *next; queue; queue = next) {
        next = queue->next;
        free_unexpected(queue);
        free(queue);
    }
    for (int i = 0; i < LINK_DATA_CHANNELS_MAX; i++)
        free(link->data_channels[i].unexpected);
    bytes_fini(&link->control_out);
    bytes_fini(&link->control_in);
}

bhvd_status link_flush(struct link *link)
{
    while (link->control_out.size) {
        struct iovec part = {link->control_out.data + link->control_flushed,
                             link->control_out.size - link->control_flushed};
        size_t moved;
        bhvd_status status = link->control.ops->send(&link->control, &part, 1, &moved);
        if (status || moved == 0)
            return status;
        link->control_flushed += moved;
        if (link->control_flushed == link->control_out.size)
            link->control_out.size = link->control_flushed = 0;
    }
    return BHVD_OK;
}

bhvd_status link_send_frame(struct link *link, uint8_t type, const struct bytes *payload, bool no_wakeup)
{
    if (payload->failed || payload->size > LINK_FRAME_MAX)
        return BHVD_ERR_SYSTEM;
    bytes_put_u32(&link->control_out, (uint32_t)payload->size);
    bytes_put_u8(&link->control_out, type);
    bytes_put(&link->control_out, payload->data, payload->size);
    if (link->control_out.failed)
        return BHVD_ERR_SYSTEM;
    link->control_sent += FRAME_HEADER + payload->size;
    link->control.no_wakeup = no_wakeup;
    bhvd_status status = link_flush(link);
    link->control.no_wakeup = false;
    if (link->control_out.size)
        link_mark_active(link);
    return status;
}

// ------------------------------------------------------------------------------------------------------------- messages

static struct transfer_header header_of(uint64_t execution, uint32_t number, size_t size)
{
    return (struct transfer_header){(uint32_t)execution, number | (execution & LINK_PAIRWISE ? TRANSFER_OF_PAIRWISE : 0), size};
}

static bool is_of_pairwise(const struct transfer_header *header) { return header->number & TRANSFER_OF_PAIRWISE; }

static struct match_queue **find_pairwise(struct match_queue **at, uint32_t id)
{
    while (*at && (*at)->execution != id)
        at = &(*at)->next;
    return at;
}

// The queue of an execution, which may take over another's, or of a pairwise operation. NULL: the other is not over; no memory.
static struct match_queue *take_queue(struct link *link, uint64_t execution)
{
    if (execution & LINK_PAIRWISE) {
        struct match_queue **at = find_pairwise(&link->pairwise, (uint32_t)execution);
        if (!*at && (*at = malloc(sizeof **at)))
            **at = (struct match_queue){.execution = (uint32_t)execution};
        return *at;
    }
    struct match_queue *queue = &link->queues[execution % LINK_MATCH_QUEUES];
    if (queue->execution == (uint32_t)execution)
        return queue;
    if (queue->receives.head || queue->unexpected.head)
        return NULL;
    *queue = (struct match_queue){.execution = (uint32_t)execution};
    return queue;
}

void link_end_pairwise(struct link *link, uint64_t pairwise)
{
    struct match_queue **at = find_pairwise(&link->pairwise, (uint32_t)pairwise), *queue = *at;
    if (!queue)
        return;
    *at = queue->next;
    free_unexpected(queue);
    free(queue);
}

static void finish(struct transfer *transfer, struct traffic *traffic)
{
    traffic->done++;
    transfer->done = true;
    if (transfer->finished)
        fifo_put(transfer->finished, transfer, next);
}

// link_advance reports the error.
static void break_link(struct link *link, bhvd_status error)
{
    link->error = error;
    link_mark_active(link);
}

// A pairwise operation's queue lacks memory; that of an execution is in use by another.
static bhvd_status why_no_queue(bool is_of_pairwise) { return is_of_pairwise ? BHVD_ERR_SYSTEM : BHVD_ERR_PROTOCOL; }

static struct match_queue *queue_or_break(struct link *link, uint64_t execution)
{
    struct match_queue *queue = take_queue(link, execution);
    if (!queue)
        break_link(link, why_no_queue(execution & LINK_PAIRWISE));
    return queue;
}

uint32_t link_number_send(struct link *link, uint64_t execution)
{
    struct match_queue *queue = queue_or_break(link, execution);
    return queue ? queue->sent++ : 0;
}

uint32_t link_number_recv(struct link *link, uint64_t execution)
{
    struct match_queue *queue = queue_or_break(link, execution);
    return queue ? queue->received++ : 0;
}

void link_send_numbered(struct link *link, uint64_t execution, uint32_t number, struct transfer *transfer, const void *buffer,
                        size_t size, struct transfer_queue *finished, bool has_priority)
{
    link->sends.posted++;
    *transfer = (struct transfer){
        .buffer = (void *)buffer, .size = size, .header = header_of(execution, number, size), .finished = finished};
    fifo_put(has_priority ? &link->priority_waiting : &link->waiting, transfer, next);
    link_mark_active(link);
}

// Removes the message of this number from the queue.
static struct transfer *take_numbered(struct transfer_queue *queue, uint32_t number)
{
    struct transfer **at = &queue->head;
    while (*at && (*at)->header.number != number)
        at = &(*at)->next;
    return fifo_remove(queue, at, next);
}

// An unexpected message that a data channel is still reading becomes an expected one.
static bool claim_unexpected_in_flight(struct link *link, struct transfer *transfer)
{
    for (int i = 0; i < link->data_channel_count; i++) {
        struct transfer *unexpected = link->data_channels[i].unexpected;
        if (unexpected && unexpected->header.execution == transfer->header.execution &&
            unexpected->header.number == transfer->header.number) {
            if (unexpected->size != transfer->size)
                break_link(link, BHVD_ERR_PROTOCOL);
            else if (unexpected->moved)
                memcpy(transfer->buffer, unexpected->buffer, unexpected->moved);
            transfer->moved = unexpected->moved;
            link->data_channels[i].receiving = transfer;
            link->data_channels[i].unexpected = NULL;
            free(unexpected);
            return true;
        }
    }
    return false;
}

void link_recv_numbered(struct link *link, uint64_t execution, uint32_t number, struct transfer *transfer, void *buffer,
                        size_t size, struct transfer_queue *finished)
{
    struct match_queue *queue = queue_or_break(link, execution);
    *transfer = (struct transfer){
        .buffer = buffer, .size = size, .header = header_of(execution, number, size), .finished = finished};
    link->receives.posted++;
    if (!queue)
        return;
    if (link->is_blocked || link->lacks_data_channels)
        link_mark_active(link);
    struct transfer *unexpected = queue->unexpected.head ? take_numbered(&queue->unexpected, transfer->header.number) : NULL;
    if (unexpected) {
        const bool fits = unexpected->size == size;
        if (fits && size)
            memcpy(buffer, unexpected->buffer, size);
        free(unexpected);
        if (fits)
            finish(transfer, &link->receives);
        else
            break_link(link, BHVD_ERR_PROTOCOL);    // not finished: nothing may read the buffer
    } else if (!claim_unexpected_in_flight(link, transfer)) {
        fifo_put(&queue->receives, transfer, next);
    }
}

static struct transfer *next_to_send(struct link *link, struct data_channel *data)
{
    if (!data->sending)
        data->sending = fifo_take(link->priority_waiting.head ? &link->priority_waiting : &link->waiting, next);
    return data->sending;
}

static bhvd_status advance_sends(struct link *link, struct data_channel *data, bool *progress)
{
    struct transfer *t;
    while ((t = next_to_send(link, data))) {
        size_t moved, header_left = sizeof t->header - t->header_moved;
        struct iovec parts[2] = {
            {(char *)&t->header + t->header_moved, header_left},
            {t->buffer + t->moved, t->size - t->moved},
        };
        bool both = header_left && t->size;
        bhvd_status status =
            data->channel.ops->send(&data->channel, header_left ? parts : parts + 1, both ? 2 : 1, &moved);
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
        data->sending = NULL;
        finish(t, &link->sends);
    }
    return BHVD_OK;
}

static bool has_started(const struct link *link, const struct transfer_header *header)
{
    return is_of_pairwise(header) || (int32_t)(header->execution - (uint32_t)*link->started) <= 0;
}

// The queue of an incoming message. NULL: the peer sent a message of no valid execution, or no memory.
static struct match_queue *queue_for(struct link *link, const struct transfer_header *header)
{
    if (is_of_pairwise(header))
        return take_queue(link, LINK_PAIRWISE | header->execution);
    const bool is_long_over = (uint32_t)*link->started - header->execution >= LINK_MATCH_QUEUES;    // it has no more messages
    return is_long_over ? NULL : take_queue(link, header->execution);
}

// Could an expected message be behind an unexpected one? One of the same execution is not blocked for good: test_schedules.c runs
// all schedules over channels that keep their order.
static bool others_are_expected(const struct link *link, const struct match_queue *queue)
{
    for (int i = 0; i < LINK_MATCH_QUEUES; i++)
        if (&link->queues[i] != queue && link->queues[i].receives.head)
            return true;
    for (const struct match_queue *pairwise = link->pairwise; pairwise; pairwise = pairwise->next)
        if (pairwise != queue && pairwise->receives.head)
            return true;
    return link->data_channel_count > 1 && queue && queue->receives.head;
}

// Finds the receive for a complete header. receiving stays NULL if nobody expects the message yet; then it stays in its data
// channel.
static bhvd_status find_receiver(struct link *link, struct data_channel *data)
{
    const struct transfer_header *header = &data->incoming;
    if (!has_started(link, header))
        return BHVD_OK;
    struct match_queue *queue = queue_for(link, header);
    if (!queue)
        return why_no_queue(is_of_pairwise(header));
    data->receiving = take_numbered(&queue->receives, header->number);
    if (data->receiving) {
        data->is_unexpected = false;
        return data->receiving->size == header->size ? BHVD_OK : BHVD_ERR_PROTOCOL;
    }
    // Work between two polls may post the receive: wait for the second. After the peer has left, a poll without progress is final.
    const bool seen_before = data->is_unexpected || link->state != LINK_OPEN;
    data->is_unexpected = true;
    if (!seen_before || header->size > LINK_UNEXPECTED_MAX || !others_are_expected(link, queue))
        return BHVD_OK;
    struct transfer *unexpected = malloc(sizeof *unexpected + header->size);
    if (!unexpected)
        return BHVD_ERR_SYSTEM;
    *unexpected = (struct transfer){.buffer = (unsigned char *)(unexpected + 1), .size = header->size, .header = *header};
    data->receiving = data->unexpected = unexpected;
    data->is_unexpected = false;
    return BHVD_OK;
}

// NULL: a pairwise operation without a queue.
static const struct match_queue *queue_there(const struct link *link, const struct transfer_header *header)
{
    struct match_queue *pairwise = link->pairwise;
    return is_of_pairwise(header) ? *find_pairwise(&pairwise, header->execution)
                                  : &link->queues[header->execution % LINK_MATCH_QUEUES];
}

bool data_channel_wants_input(const struct link *link, const struct data_channel *data)
{
    if (!traffic_is_pending(&link->receives))
        return false;
    if (data->receiving || data->incoming_moved < sizeof data->incoming)
        return true;
    const struct transfer_header *header = &data->incoming;
    if (!has_started(link, header))
        return false;
    const struct match_queue *queue = queue_there(link, header);
    for (const struct transfer *t = queue ? queue->receives.head : NULL; t; t = t->next)
        if (t->header.number == header->number)
            return true;
    return (queue && queue->execution != header->execution) ||
           (header->size <= LINK_UNEXPECTED_MAX && others_are_expected(link, queue));
}

static bhvd_status read_header(struct data_channel *data, bool *progress)
{
    size_t moved;
    unsigned char *at = (unsigned char *)&data->incoming + data->incoming_moved;
    bhvd_status status = data->channel.ops->recv(&data->channel, at, sizeof data->incoming - data->incoming_moved, &moved);
    data->incoming_moved += moved;
    if (moved)
        *progress = true;
    return status;
}

static bhvd_status advance_receives(struct link *link, struct data_channel *data, bool *progress)
{
    struct channel *channel = &data->channel;
    while (data->receiving || traffic_is_pending(&link->receives)) {
        size_t moved;
        if (data->incoming_moved < sizeof data->incoming) {
            bhvd_status status = read_header(data, progress);
            if (status || data->incoming_moved < sizeof data->incoming)
                return status;
        }
        if (!data->receiving) {
            bhvd_status status = find_receiver(link, data);
            if (status || !data->receiving)
                return status;
        }
        struct transfer *t = data->receiving;
        while (t->moved < t->size) {
            bhvd_status status = channel->ops->recv(channel, t->buffer + t->moved, t->size - t->moved, &moved);
            if (status || moved == 0)
                return status;
            *progress = true;
            t->moved += moved;
            link->payload_received += moved;
        }
        data->receiving = NULL;
        data->incoming_moved = 0;
        if (t != data->unexpected) {
            finish(t, &link->receives);
            continue;
        }
        data->unexpected = NULL;
        struct match_queue *queue = queue_for(link, &t->header);
        if (!queue) {
            const bhvd_status why = why_no_queue(is_of_pairwise(&t->header));
            free(t);
            return why;
        }
        fifo_put(&queue->unexpected, t, next);
    }
    return BHVD_OK;
}

// After the peer has left, some data channels may end before others: the expected message comes over one of the others.
static bhvd_status advance_all_receives(struct link *link, bool *progress)
{
    int ended = 0;
    for (int i = 0; i < link->data_channel_count && traffic_is_pending(&link->receives); i++) {
        struct data_channel *data = &link->data_channels[i];
        bhvd_status status = advance_receives(link, data, progress);
        if (status == BHVD_ERR_PEER_LOST && !data->receiving && data->incoming_moved == 0)
            ended++;
        else if (status)
            return status;
    }
    const bool is_over = ended == link->data_channel_count || (ended && link->state == LINK_OPEN);
    return is_over && traffic_is_pending(&link->receives) ? BHVD_ERR_PEER_LOST : BHVD_OK;
}

// *is_of_frame: the error is on_frame's.
static bhvd_status advance_control(struct link *link, link_frame_fn on_frame, void *arg, bool *progress, bool *is_of_frame)
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
                return BHVD_ERR_PROTOCOL;
            if (link->control_in.size - used < FRAME_HEADER + (size_t)size)
                break;
            const unsigned char *payload = frame + FRAME_HEADER;
            used += FRAME_HEADER + (size_t)size;
            link->frames_received++;
            status = on_frame(arg, link, frame[4], (struct bytes_reader){payload, payload + size, false});
            *is_of_frame = status != BHVD_OK;
            if (status)
                return status;
        }
        bytes_shift(&link->control_in, used);
    }
}

// A data channel has ended. If the peer's process has ended, its control channel ends soon too, perhaps after a goodbye.
static bool may_explain(struct link *link)
{
    const int64_t now_ns = clock_now_ns();
    if (!link->unexplained_since_ns)
        link->unexplained_since_ns = now_ns;
    return now_ns - link->unexplained_since_ns < EXPLANATION_NS;
}

bhvd_status link_advance(struct link *link, link_frame_fn on_frame, void *arg, bool *progress)
{
    bhvd_status status = BHVD_OK;
    bool is_of_frame = false;
    if (link->error)
        return link->error;
    if (link->state == LINK_UNCONNECTED)
        return BHVD_OK;
    if (link->state != LINK_OPEN) {
        // The peer is gone, but data that it sent before may still be in the ring or the socket.
        return link->lacks_data_channels ? BHVD_OK : advance_all_receives(link, progress);
    }
    if (link->control_out.size) {
        const size_t unwritten = link->control_out.size - link->control_flushed;
        status = link_flush(link);
        *progress |= link->control_out.size - link->control_flushed != unwritten;
    }
    for (int i = 0; i < link->data_channel_count && !status && traffic_is_pending(&link->sends) && !link->lacks_data_channels; i++)
        status = advance_sends(link, &link->data_channels[i], progress);
    if (!status && !link->lacks_data_channels)
        status = advance_all_receives(link, progress);
    // Last, so that a goodbye is seen after earlier data; and even if a data channel broke, because
    // the goodbye may explain it.
    if ((!status || status == BHVD_ERR_PEER_LOST) &&
        (!link->control.ops->readable || link->control.ops->readable(&link->control))) {
        bhvd_status control = advance_control(link, on_frame, arg, progress, &is_of_frame);
        if (status == BHVD_ERR_PEER_LOST && !control && link->state == LINK_OPEN && may_explain(link))
            return BHVD_OK;
        is_of_frame = is_of_frame && !status;
        status = status ? status : control;
    }
    if (status == BHVD_ERR_PEER_LOST && !is_of_frame) {
        if (link->state == LINK_DEPARTED)
            return BHVD_OK;
        link->state = LINK_LOST;
    }
    return status;
}

void link_hang_up(struct link *link, link_frame_fn on_frame, void *arg, bool *progress)
{
    if (link_advance(link, on_frame, arg, progress) || link->state == LINK_OPEN)
        link->state = link->state == LINK_DEPARTED ? LINK_DEPARTED : LINK_LOST;
}

bool link_ready(const struct link *link)
{
    if (link->error)
        return true;
    if (link->control.ops->readable && link->state == LINK_OPEN && link->control.ops->readable(&link->control))
        return true;
    if (link->control_out.size && link->control.ops->writable && link->control.ops->writable(&link->control))
        return true;
    for (int i = 0; i < link->data_channel_count; i++) {
        const struct data_channel *data = &link->data_channels[i];
        const struct channel_ops *ops = data->channel.ops;
        if ((ops->writable && data_channel_has_output(link, data) && ops->writable(&data->channel)) ||
            (ops->readable && data_channel_wants_input(link, data) && ops->readable(&data->channel)))
            return true;
    }
    return false;
}

bool link_needs_poll(const struct link *link)
{
    for (int i = 0; i < link->data_channel_count; i++) {
        const struct data_channel *data = &link->data_channels[i];
        const struct channel_ops *ops = data->channel.ops;
        // A peer that has left needs no more bytes, but may have sent some.
        if (ops && ops->unfinished && (data_channel_has_output(link, data) || data_channel_wants_input(link, data) ||
                                       (link->state == LINK_OPEN && ops->unfinished(&data->channel))))
            return true;
    }
    return false;
}

static void check_silence(struct channel *channel, int64_t now_ns, int64_t *longest_ns)
{
    int64_t silence_ns = channel->ops && channel->ops->silence_ns ? channel->ops->silence_ns(channel, now_ns) : -1;
    if (*longest_ns < silence_ns)
        *longest_ns = silence_ns;
}

int64_t link_silence_ns(struct link *link, int64_t now_ns)
{
    int64_t longest_ns = -1;
    check_silence(&link->control, now_ns, &longest_ns);
    for (int i = 0; i < link->data_channel_count; i++)
        check_silence(&link->data_channels[i].channel, now_ns, &longest_ns);
    return longest_ns;
}
