// A link: everything this rank exchanges with one peer. It has a control channel (small frames: negotiation, goodbye)
// and one or more data channels (the messages of collectives), so that control never waits behind data. Messages wait in one
// queue; the first data channel that can write takes the next. So a lone message uses one connection, which stays warm, and
// messages leave one after the other rather than side by side: the peer can work on the first while the next is on the wire.
//
// Several executions may be in flight at once. Each has a queue: messages carry the number of their execution and their own number
// in it, so messages of different executions may be posted in any order. Both sides must post the same messages of an execution;
// their sizes are compared, so that a disagreement is an error, not garbage.
// A message that arrives before its receive is posted waits in its socket, and blocks those behind it. If another execution's
// expected message could be behind it, the link reads it into its own memory (an unexpected message): otherwise two ranks
// could deadlock. Messages of an execution that has not started here are not read: its window (core/negotiation/coordinator.h)
// ensures that nobody needs messages behind them. A pairwise operation (core/negotiation/pairwise.h) has no place in the order of
// executions, so its messages are read even before it has started here. Unexpected messages take no more memory than the peer sends
// in executions in flight, whose bytes the window limits, and in pairwise operations that this rank has
// posted. Thread: holder of engine_lock.
#pragma once

#include "base/bytes.h"
#include "base/containers.h"
#include "transport/channel.h"

enum {
    LINK_FRAME_MAX = 64 << 20,                  // bytes of a control frame's payload
    LINK_DATA_CHANNELS_MAX = 8,
    LINK_MATCH_QUEUES = 8,                      // executions in flight at once
    LINK_UNEXPECTED_MAX = 4 << 20               // longest message that is read before it is expected; longer than any code
};

// The owner of messages: an execution, by its number modulo 2^32, or a pairwise operation of this id.
#define LINK_PAIRWISE (UINT64_C(1) << 32)

enum link_state {
    LINK_OPEN,
    LINK_DEPARTED,          // it said goodbye: earlier data can still be read
    LINK_LOST,          // the connection broke without a goodbye
    LINK_UNCONNECTED    // not needed so far
};

struct transfer_header {
    uint32_t execution;                         // its number modulo 2^32; or a pairwise operation's id
    uint32_t number;                            // per execution and direction; a pairwise operation's: plus TRANSFER_OF_PAIRWISE
    uint64_t size;
};

enum { TRANSFER_OF_PAIRWISE = 1 << 30 };

struct transfer_queue;

// One message in flight; owned by the caller, who keeps it and its buffer alive until done.
struct transfer {
    struct transfer *next;
    unsigned char *buffer;
    size_t size, moved;                         // moved counts payload bytes
    size_t header_moved;
    struct transfer_header header;
    struct transfer_queue *finished;            // the queue that it joins when it is done; NULL: none
    bool done;
};

struct transfer_queue FIFO(struct transfer);

struct data_channel {
    struct channel channel;
    struct transfer *sending;                   // the message that has been begun
    struct transfer_header incoming;
    size_t incoming_moved;                      // of the header that is being read
    struct transfer *receiving;                 // the transfer of the complete header; NULL: nobody expects it yet
    struct transfer *unexpected;                // `receiving`, if it is the data channel's own message; else NULL
    bool is_unexpected;                         // a poll has seen the complete header, and nobody expected the message
};

// The messages of one execution. When it is over another execution takes over the queue; a pairwise operation has its own.
struct match_queue {
    struct match_queue *next;                   // the next pairwise operation's
    uint32_t execution;
    uint32_t sent, received;                    // number of messages numbered so far
    struct transfer_queue receives;             // posted receives
    struct transfer_queue unexpected;           // arrived before they were expected; owned by the link
};

// Message counts of a link in one direction, over all its data channels.
struct traffic {
    uint64_t posted, done;
};

// Links in the order of link_mark_active.
struct link_queue FIFO(struct link);

struct link {
    int rank;                                   // the peer's
    int local_index;                            // its index in host memory, -1 when it is on another host
    enum link_state state;
    struct doorbell doorbell;                   // the peer's, if it is on this host
    int64_t round_trip_ns;                      // to the peer's kernel, measured while connecting; 0: on this host
    int liveness_fd;                            // shm: a UNIX socket that breaks when the peer dies; else -1
    uint32_t liveness_registered;               // events for which it is registered (poller.h)
    struct channel control;
    struct data_channel data_channels[LINK_DATA_CHANNELS_MAX];
    int data_channel_count;
    bool lacks_data_channels;                   // not all of them are connected: messages wait
    int opening;                                // channels being connected by this rank
    struct match_queue queues[LINK_MATCH_QUEUES], *pairwise;
    bhvd_status error;                          // BHVD_ERR_PROTOCOL: the two sides disagree about their messages;
                                                // BHVD_ERR_SYSTEM: no memory for one; else BHVD_OK
    int64_t unexplained_since_ns;               // since when a data channel has ended but the control channel has not; 0: no
    const uint64_t *started;                    // the number of the last execution that has started here
    struct link_queue *active_links;             // the queue for link_mark_active (poller.h); NULL: none
    struct link *next_ready;
    bool is_queued;                             // it is in that queue
    bool is_blocked, is_in_blocked_list;        // poller.h: a channel has input that nobody expects yet; the list of those holds it
    struct transfer_queue waiting, priority_waiting;    // messages that no data channel has begun; the latter go first
    struct bytes control_out;                   // frames to write; the first control_flushed bytes are written
    size_t control_flushed;
    struct bytes control_in;                    // a frame being assembled
    struct traffic sends, receives;
    _Atomic uint64_t payload_sent, payload_received, control_sent;
    uint64_t frames_received;
};

typedef bhvd_status (*link_frame_fn)(void *arg, struct link *link, uint8_t type, struct bytes_reader payload);

// started: belongs to the owner of executions; must outlive the link.
void link_init(struct link *link, int rank, const uint64_t *started);
// Closes the descriptors.
void link_close(struct link *link);
// The same, and frees buffers and unexpected messages. Does not access the callers' transfers, which may be freed.
void link_fini(struct link *link);

// Queues a control frame and tries to write it at once. no_wakeup: does not wake an idle peer. BHVD_ERR_SYSTEM: no memory,
// or more than LINK_FRAME_MAX bytes, which no peer would read.
bhvd_status link_send_frame(struct link *link, uint8_t type, const struct bytes *payload, bool no_wakeup);

// Queues the link for the next poll, because it has work that no descriptor reports.
void link_mark_active(struct link *link);
// NULL: the queue is empty.
struct link *link_queue_pop(struct link_queue *queue);

// Writes as many frames as possible without blocking. control_out.size is 0 when nothing is left.
bhvd_status link_flush(struct link *link);

// The counter of the link's medium.
static inline uint64_t *link_medium(const struct link *link, uint64_t *shm, uint64_t *tcp, uint64_t *mpi)
{
    const struct channel_ops *ops = link->data_channels[0].channel.ops;
    return ops == &channel_tcp_ops ? tcp : ops == &channel_mpi_ops ? mpi : shm;
}

// Posts an execution's next message in two steps, because a schedule knows its messages long before it can post them: first its
// number, in an order that both sides know; then the message, which moves in link_advance. Size 0 sends a header only. The two
// sides' sizes must agree. finished: the queue that the transfer joins when done. has_priority: goes before others; the same
// for all messages of an execution. link_advance reports BHVD_ERR_PROTOCOL: the queue is in use by another, or an unexpected
// size differs.
uint32_t link_number_send(struct link *link, uint64_t execution);
uint32_t link_number_recv(struct link *link, uint64_t execution);
void link_send_numbered(struct link *link, uint64_t execution, uint32_t number, struct transfer *transfer, const void *buffer,
                        size_t size, struct transfer_queue *finished, bool has_priority);
void link_recv_numbered(struct link *link, uint64_t execution, uint32_t number, struct transfer *transfer, void *buffer,
                        size_t size, struct transfer_queue *finished);
// Ends a pairwise operation; the next one of this id numbers its messages from the start.
void link_end_pairwise(struct link *link, uint64_t pairwise);

// Moves all data that it can without blocking, passes complete control frames to on_frame, sets *progress if anything moved.
// BHVD_ERR_PEER_LOST: the peer is gone, see state; BHVD_ERR_PROTOCOL: it broke the protocol; BHVD_ERR_SYSTEM: no memory; or
// on_frame's error, which does not change the state, since it may be about another rank.
bhvd_status link_advance(struct link *link, link_frame_fn on_frame, void *arg, bool *progress);

// The liveness socket broke: reads the remaining data, then marks the peer lost unless it said goodbye.
void link_hang_up(struct link *link, link_frame_fn on_frame, void *arg, bool *progress);

static inline bool traffic_is_pending(const struct traffic *traffic) { return traffic->posted != traffic->done; }

static inline bool data_channel_has_output(const struct link *link, const struct data_channel *data)
{
    return data->sending || link->waiting.head || link->priority_waiting.head;
}

// Is there more to read now: is something expected, and is the current message not an unexpected one?
bool data_channel_wants_input(const struct link *link, const struct data_channel *data);

// True if link_advance would move something or report an error, as far as can be known without a system call.
bool link_ready(const struct link *link);

// How long the peer's host has acknowledged no data in flight on one of the connections, as far as earlier
// calls can tell; -1: no data is in flight.
int64_t link_silence_ns(struct link *link, int64_t now_ns);

// True if data is in flight that no descriptor reports: it moves only while this rank polls, and nothing would wake the rank.
bool link_needs_poll(const struct link *link);
