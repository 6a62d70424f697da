// Negotiation: ranks match operations by name, whatever the order they post them in. Event-driven:
//
//     member       posts -> request (in full, or just the id of a cached agreement) -> coordinator (rank 0)
//     coordinator  when the last member has asked: checks that all ask for the same, decides what is fused
//                  -> RESPONSE to every member
//     member       puts the responses, in the order they come, into its list of executions
//
// There is one coordinator for all process sets, so there is one global order of responses, and every rank starts its part of it
// in that order. Over links several go on at once and end in any order, within a window: a response says which executions must
// be over before it starts, the same for all. So the earliest unfinished execution has all its members free for it, and what
// comes for a later one that has not started here comes from a rank that has finished the earliest (transport/link.h): hence
// no deadlock.
//
// What a response adds to the request ("agreed"): allgather: dim 0 of each tensor on each rank, [tensor][set rank];
// alltoall: of each tensor the rows that this member receives from each, [set rank], and the largest number of rows that any
// member sends to any: so an answer of its own to each member, of n numbers, not n^2 to all; join: the rank that joined last; others: nothing.
#ifndef BHVD_NEGOTIATION_H
#define BHVD_NEGOTIATION_H

#include "base/table.h"
#include "core/message/request.h"
#include "run/schedule.h"

struct link;

#define JOIN_NAME "join"        // every rank's join has this name

enum { COORDINATOR = 0 };        // its rank

enum frame_type {
    FRAME_RESPONSE = 2, FRAME_STALE = 3,         // inside FRAME_DOWN
    FRAME_GOODBYE = 4, FRAME_HEARTBEAT = 5, FRAME_LATE = 6,
    FRAME_UP = 7, FRAME_DOWN = 8, FRAME_LEAVING = 9, FRAME_MOVED = 10, FRAME_CLOSING = 11,      // relay.h
    FRAME_MEET = 12, FRAME_PART = 13            // meeting.h
};
// How a request or an answer says which operation it is about; ITEM_DETACHED: relay.h; ITEM_CARRIED: by its id, with values (carried.h).
// ITEM_PARTED: in full, by one that has parted; ITEM_STANDING: by its id, and it stands from now on (meeting.h).
enum item_tag { ITEM_CACHED = 0, ITEM_FULL = 1, ITEM_DETACHED = 2, ITEM_CARRIED = 3, ITEM_PARTED = 4, ITEM_STANDING = 5 };

enum { REQUEST_FRAME_BYTES = 1 << 20 };         // far below LINK_FRAME_MAX, however many operations are posted at once

// Some fused operations that are executed together.
struct execution {
    struct execution *next;
    uint64_t number;            // in the order of all responses of the job, from 1
    uint64_t after;             // it starts when those up to this number are over
    struct wire wire;           // as the coordinator has measured it: all choose by the same figures
    uint32_t process_set;       // the set may be gone when its turn comes: looked up then
    struct sent sent;           // for it, so far
    int count;
    struct work *works[];       // of operations
};

// Announces operations that this rank posted (a list linked by `next`).
bhvd_status negotiation_request(bhvd_context *ctx, struct bhvd_handle *posted);
// Announces one in full, as one that has parted from its neighbours.
bhvd_status negotiation_ask_parted(bhvd_context *ctx, struct bhvd_handle *op);
// A frame from a peer.
bhvd_status negotiation_frame(bhvd_context *ctx, struct link *link, uint8_t type, struct bytes_reader payload);
// The coordinator's frames, also when it is this rank itself: an answer; "I do not know this id, say it in full".
bhvd_status negotiation_take_response(bhvd_context *ctx, struct bytes_reader payload);
bhvd_status negotiation_take_stale(bhvd_context *ctx, struct bytes_reader payload);
// A goodbye that ends this rank's part as well: the coordinator's, or one that tells of a failure.
bhvd_status negotiation_take_end(bhvd_context *ctx, struct bytes_reader reason);
// Sends a frame of the negotiation to a rank, unless that has left.
bhvd_status negotiation_send(bhvd_context *ctx, int rank, enum frame_type type, const struct bytes *payload, bool lazy);
// Says goodbye to all peers, once: this rank takes part in nothing any more. When it failed, it says why, and when the
// coordinator is not the first to leave, who was, so that all ranks name the same cause.
void negotiation_leave(bhvd_context *ctx);

#endif
