// A link: everything this rank exchanges with one peer. It has a control channel (small frames: negotiation, goodbye)
// and one or more streams (the messages of collectives), so that control never waits behind data. Messages are dealt to
// the streams in turn; within one they keep their order.
//
// Data messages between two ranks are matched by order: both execute the operations they share in the same order
// (core/negotiation.h). Each message carries its number and size, so that a disagreement is an error, not garbage.
// Thread: the engine's owner only.
#ifndef BHVD_LINK_H
#define BHVD_LINK_H

#include "base/bytes.h"
#include "transport/transport.h"

enum {
    LINK_FRAME_MAX = 64 << 20,                  // a control frame's payload
    LINK_STREAMS_MAX = 8
};

enum link_state {
    LINK_OPEN,
    LINK_LEFT,          // it said goodbye: what it sent before can still be read
    LINK_LOST           // the connection broke without a goodbye
};

struct transfer_header {
    uint64_t number;
    uint64_t size;
};

// One message on its way; owned by the caller, who keeps it and its buffer alive until done.
struct transfer {
    struct transfer *next;
    unsigned char *buffer;
    size_t size, moved;                         // moved counts payload
    size_t header_moved;
    struct transfer_header header;
    bool done;
};

struct transfer_queue {
    struct transfer *head, **tail;
};

struct stream {
    struct channel channel;
    struct transfer_queue sends, receives;
};

// Messages of a link in one direction, over all its streams.
struct traffic {
    uint64_t posted, done;
};

struct link {
    int rank;                                   // the peer's
    int local_index;                            // its index in host memory, -1 when it is on another host
    enum link_state state;
    struct bell bell;                           // the peer's, when it is on this host
    int liveness_fd;                            // shm: a UNIX socket that breaks when the peer dies; else -1
    struct channel control;
    struct stream streams[LINK_STREAMS_MAX];
    int stream_count;
    struct bytes control_out;                   // frames not yet written, but for the first control_flushed bytes
    size_t control_flushed;
    struct bytes control_in;                    // a frame being assembled
    struct traffic sends, receives;
    _Atomic uint64_t payload_sent, payload_received, control_sent;
    uint64_t frames_received;
};

typedef bhvd_status (*link_frame_fn)(void *arg, struct link *link, uint8_t type, struct bytes_reader payload);

void link_init(struct link *link, int rank);
// Closes the descriptors.
void link_close(struct link *link);
// The same, and frees buffers; transfers are the caller's.
void link_fini(struct link *link);

// Queues a control frame and tries to write it at once. lazy: an idle peer need not be woken for it. BHVD_ERR_SYSTEM: no memory,
// or more than LINK_FRAME_MAX bytes, which no peer would read.
bhvd_status link_send_frame(struct link *link, uint8_t type, const struct bytes *payload, bool lazy);

// Writes what frames there are, as far as it goes now. control_out.size is 0 when nothing is left.
bhvd_status link_flush(struct link *link);

// Queue a message; it moves in link_advance. Size 0 sends a header only. The two sides' sizes must agree.
void link_post_send(struct link *link, struct transfer *transfer, const void *buffer, size_t size);
void link_post_recv(struct link *link, struct transfer *transfer, void *buffer, size_t size);

// Moves what can be moved, gives complete control frames to on_frame, sets *progress when anything moved.
// BHVD_ERR_PEER_LOST: the peer is gone and state tells how; BHVD_ERR_SYSTEM: it broke the protocol.
bhvd_status link_advance(struct link *link, link_frame_fn on_frame, void *arg, bool *progress);

// The liveness socket broke: reads what the peer sent before, then marks it lost unless a goodbye was among it.
void link_hang_up(struct link *link, link_frame_fn on_frame, void *arg, bool *progress);

static inline bool traffic_is_pending(const struct traffic *traffic) { return traffic->posted != traffic->done; }

// True when link_advance would move something, as far as can be told without a system call.
bool link_ready(const struct link *link);

// For how long the peer's host has acknowledged nothing of what is on its way over one of the connections, as far as earlier
// calls can tell; -1: nothing is on its way.
int64_t link_silence_ns(struct link *link, int64_t now_ns);

// True when something is under way that no descriptor tells of: it moves while this rank looks, and nothing would wake it.
bool link_needs_looking(const struct link *link);

#endif
