// Frames that ranks exchange on their control channels, and the items in those of the negotiation.
#pragma once

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
    ITEM_CACHED = 0,            // by a range of ids (id_range.h)
    ITEM_FULL = 1,
    ITEM_LEFT = 2,              // identifies none: relay.h
    ITEM_INLINE = 3,            // by its id, with values (inline_payload.h)
    ITEM_REVOKED = 4,           // in full, by a rank that revoked it (pairwise.h)
    ITEM_PAIRWISE = 5,          // by its id; it is pairwise from now on (pairwise.h)
    ITEM_RESENT = 6             // in full: the reply to CACHE_MISS. Size 0: no operation is requested by that id any more
};

enum { REQUEST_FRAME_BYTES = 1 << 20 };         // far below LINK_FRAME_MAX, however many operations are posted together
