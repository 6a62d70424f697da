// Frames that ranks exchange on their control channels, the items in those of the negotiation, and two parts of both: ranges of
// ids, and reasons.
#pragma once

#include "bagua_hvd.h"
#include "base/bytes.h"

#define JOIN_NAME "join"        // every rank's join has this name

enum { COORDINATOR = 0 };        // its rank

enum frame_type {
    FRAME_RESPONSE = 2, FRAME_CACHE_MISS = 3,    // inside FRAME_DOWN
    FRAME_GOODBYE = 4, FRAME_HEARTBEAT = 5, FRAME_STALLED = 6,
    FRAME_UP = 7, FRAME_DOWN = 8, FRAME_CLOSING = 11,      // relay.h
    FRAME_PAIRWISE_READY = 12, FRAME_PAIRWISE_REVOKE = 13          // pairwise.h
};
// How a request or a response identifies its operation.
enum item_tag {
    ITEM_CACHED = 0,            // by a range of ids (struct id_range)
    ITEM_FULL = 1,
    ITEM_LEFT = 2,              // identifies none: relay.h
    ITEM_INLINE = 3,            // by its id, with values (inline_payload.h)
    ITEM_REVOKED = 4,           // in full, by a rank that revoked it (pairwise.h)
    ITEM_PAIRWISE = 5,          // by its id; it is pairwise from now on (pairwise.h)
    ITEM_RESENT = 6             // in full: the reply to CACHE_MISS. Size 0: no operation is requested by that id any more
};

enum { REQUEST_FRAME_BYTES = 1 << 20 };         // far below LINK_FRAME_MAX, however many operations are posted together

enum { ID_RANGE_MAX = 1 << 16 };

// The encoding of cached agreements in requests and responses: ranges of consecutive ids, since ids are assigned in the order
// in which operations are first agreed on, and a program repeats itself. Wire: u8 ITEM_CACHED, u32 id, u32 count.
// This is the range at the end of a frame that is being written; zero if there is none.
struct id_range {
    uint32_t id, count;
    size_t end;                 // of the frame, when the range was last written
};

// Appends the id to the range, or begins a new one.
void id_range_put(struct id_range *range, struct bytes *out, uint32_t id);
// Call after reading the tag. Marks the reader as failed if the range is malformed.
struct id_range id_range_take(struct bytes_reader *r);

// The reason why an operation failed or a rank leaves, in wire format: after the status (u8)
//
//     cause (u8), rank (u32; 2^32 - 1: none), size of the message (u16), the message
//
// Writes the part after the status.
void reason_put(struct bytes *out, const struct bhvd_error *error);
// Reads it. False: malformed, not an error, or it blames a rank outside the job's `size`.
bool reason_take(struct bytes_reader *r, uint8_t status, int size, struct bhvd_error *error);
// The error for a rank that left.
void reason_departed(struct bhvd_error *error, int rank);
