// A link: everything this rank exchanges with one peer. It has a control channel (small frames: negotiation, goodbye)
// and one or more streams (the messages of collectives), so that control never waits behind data. A message
// goes over the stream with the least to do; within one they keep their order.
//
// Several executions may be on their way at once. Each has a queue: messages say which execution they belong to, and which one of
// it they are, so it does not matter in what order those of different executions are posted. Both sides must post the same
// messages of an execution; their sizes are compared, so that a disagreement is an error, not garbage.
//
// A message that came before it was expected waits in its socket, and so do those behind it. Where another execution's could be
// behind it, it is taken into memory of the link's instead (an unexpected message): else two ranks could wait for each other. Of an
// execution that has not started here nothing is read: its window (core/negotiation/member.h) says that nobody needs what is behind. Of a
// pairwise operation (core/negotiation/pairwise.h), which has no place in the order of executions, what comes before it has started here
// is taken, too. Thread: the engine's owner only.
#pragma once

#include "base/bytes.h"
#include "base/fifo.h"
#include "transport/transport.h"

enum {
    LINK_FRAME_MAX = 64 << 20,                  // a control frame's payload
    LINK_STREAMS_MAX = 8,
    LINK_MATCH_QUEUES = 8,                      // executions that may be on their way at once
    LINK_UNEXPECTED_MAX = 1 << 20               // bytes of a message that is taken although nobody expects it yet
};

// Whose messages they are: an execution, by its number modulo 2^32, or a pairwise operation of this id.
#define LINK_PAIRWISE (UINT64_C(1) << 32)

enum link_state {
    LINK_OPEN,
    LINK_LEFT,          // it said goodbye: what it sent before can still be read
    LINK_LOST,          // the connection broke without a goodbye
    LINK_UNOPENED       // nobody has needed it
};

struct transfer_header {
    uint32_t execution;                         // its number modulo 2^32; or a pairwise operation's id
    uint32_t number;                            // among its messages in this direction; of a pairwise operation: and TRANSFER_OF_PAIRWISE
    uint64_t size;
};

enum { TRANSFER_OF_PAIRWISE = 1 << 30 };

struct transfer_queue;

// One message on its way; owned by the caller, who keeps it and its buffer alive until done.
struct transfer {
    struct transfer *next;
    unsigned char *buffer;
    size_t size, moved;                         // moved counts payload
    size_t header_moved;
    struct transfer_header header;
    struct transfer_queue *finished;            // where it goes when it is done; NULL: nowhere
    bool done;
};

struct transfer_queue FIFO(struct transfer);

struct stream {
    struct channel channel;
    struct transfer_queue sends, urgent;        // urgent: between two of the others
    struct transfer *sending;                   // of these, begun
    size_t waiting_nbytes;                      // of all these messages, until they are with the kernel
    struct transfer_header incoming;
    size_t incoming_moved;                      // of the header that is being read
    struct transfer *receiving;                 // what belongs to it, once it is complete; NULL: nobody expects it yet
    struct transfer *unexpected;                // `receiving`, while the message is the stream's own; else NULL
    bool is_early;                              // and nobody did at the last look
};

// The messages of one execution. A queue is taken over by another execution when this one is over; a pairwise operation's is its own.
struct match_queue {
    struct match_queue *next;                   // of the pairwise operations
    uint32_t execution;
    uint32_t sent, received;                    // messages that were numbered
    struct transfer_queue receives;             // expected
    struct transfer_queue unexpected;           // came before they were expected; the link's own
};

// Messages of a link in one direction, over all its streams.
struct traffic {
    uint64_t posted, done;
};

// Links in the order in which they were noted.
struct link_queue FIFO(struct link);

struct link {
    int rank;                                   // the peer's
    int local_index;                            // its index in host memory, -1 when it is on another host
    enum link_state state;
    struct doorbell doorbell;                   // the peer's, when it is on this host
    int64_t round_trip_ns;                      // to the peer's kernel, when they were connected; 0: on this host
    int liveness_fd;                            // shm: a UNIX socket that breaks when the peer dies; else -1
    uint32_t liveness_asked;                    // events of it that the kernel tells of (poller.h)
    struct channel control;
    struct stream streams[LINK_STREAMS_MAX];
    int stream_count;
    bool lacks_streams;                         // not all of them are connected: what is posted waits
    int opening;                                // channels that this rank is connecting
    struct match_queue queues[LINK_MATCH_QUEUES], *pairwise;
    bool is_broken;                             // the two sides do not agree on their messages, or there is no memory for one
    int64_t unexplained_since_ns;               // a stream is at its end, and the control channel is not; 0: no
    const uint64_t *started;                    // the number of the last execution that has started here
    struct link_queue *due;                     // where it is noted (poller.h); NULL: nowhere
    struct link *next_due;
    bool is_due;                                // it is there
    bool is_unwatched, is_listed;               // poller.h: a stream is not listened to; it is among the links of which one is not
    struct bytes control_out;                   // frames not yet written, but for the first control_flushed bytes
    size_t control_flushed;
    struct bytes control_in;                    // a frame being assembled
    struct traffic sends, receives;
    _Atomic uint64_t payload_sent, payload_received, control_sent;
    uint64_t frames_received;
};

typedef bhvd_status (*link_frame_fn)(void *arg, struct link *link, uint8_t type, struct bytes_reader payload);

// started: of whoever runs executions, for as long as the link lives.
void link_init(struct link *link, int rank, const uint64_t *started);
// Closes the descriptors.
void link_close(struct link *link);
// The same, and frees buffers and unexpected messages. Does not look at the callers' transfers, which may be gone.
void link_fini(struct link *link);

// Queues a control frame and tries to write it at once. lazy: an idle peer need not be woken for it. BHVD_ERR_SYSTEM: no memory,
// or more than LINK_FRAME_MAX bytes, which no peer would read.
bhvd_status link_send_frame(struct link *link, uint8_t type, const struct bytes *payload, bool lazy);

// Something is to be done for the link that no descriptor tells of.
void link_note(struct link *link);
// NULL: nothing is to be done for any.
struct link *link_queue_pop(struct link_queue *queue);

// Writes what frames there are, as far as it goes now. control_out.size is 0 when nothing is left.
bhvd_status link_flush(struct link *link);

// The counter that is its medium's.
static inline uint64_t *link_medium(const struct link *link, uint64_t *shm, uint64_t *tcp, uint64_t *mpi)
{
    const struct channel_ops *ops = link->streams[0].channel.ops;
    return ops == &channel_tcp_ops ? tcp : ops == &channel_mpi_ops ? mpi : shm;
}

// An execution's next message, in two steps, since who has a schedule knows its messages long before it can post them: its number, in an
// order that the peer knows too; then the message, which moves in link_advance. Size 0 sends a header only. The two sides' sizes must
// agree. finished: where the transfer goes when it is done. urgent: before those that are not, the same for all messages of an execution.
// BHVD_ERR_SYSTEM is noted in the link, and said by link_advance: an execution still has the queue, or an unexpected message does not fit.
uint32_t link_number_send(struct link *link, uint64_t execution);
uint32_t link_number_recv(struct link *link, uint64_t execution);
void link_send_numbered(struct link *link, uint64_t execution, uint32_t number, struct transfer *transfer, const void *buffer,
                        size_t size, struct transfer_queue *finished, bool urgent);
void link_recv_numbered(struct link *link, uint64_t execution, uint32_t number, struct transfer *transfer, void *buffer,
                        size_t size, struct transfer_queue *finished);
// A pairwise operation is over: its next one numbers its messages anew.
void link_end_pairwise(struct link *link, uint64_t pairwise);

// Moves what can be moved, gives complete control frames to on_frame, sets *progress when anything moved.
// BHVD_ERR_PEER_LOST: the peer is gone and state tells how; BHVD_ERR_SYSTEM: it broke the protocol.
bhvd_status link_advance(struct link *link, link_frame_fn on_frame, void *arg, bool *progress);

// The liveness socket broke: reads what the peer sent before, then marks it lost unless a goodbye was among it.
void link_hang_up(struct link *link, link_frame_fn on_frame, void *arg, bool *progress);

static inline bool traffic_is_pending(const struct traffic *traffic) { return traffic->posted != traffic->done; }

static inline bool stream_has_output(const struct stream *stream)
{
    return stream->sending || stream->sends.head || stream->urgent.head;
}

// Would more be read than is read already: something is expected, and what has come is not waiting to be expected?
bool stream_wants_input(const struct link *link, const struct stream *stream);

// True when link_advance would move something, as far as can be told without a system call.
bool link_ready(const struct link *link);

// For how long the peer's host has acknowledged nothing of what is on its way over one of the connections, as far as earlier
// calls can tell; -1: nothing is on its way.
int64_t link_silence_ns(struct link *link, int64_t now_ns);

// True when something is under way that no descriptor tells of: it moves while this rank looks, and nothing would wake it.
bool link_needs_poll(const struct link *link);
