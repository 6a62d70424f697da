// Negotiation in a tree (docs/decisions/engine.md): ranks announce to their parent, and hear answers from it. A rank with
// children is a relay: it bundles what goes up and passes on what comes down, and neither counts nor knows process sets.
// What it collects goes on its way in relay_flush, at the end of each turn of the engine. A star is a tree without relays.
//
//     UP        bundle.h
//     DOWN      items, each: the set of ranks that it is for (none: all below, and the receiver), u8 frame type, u32 size,
//               that frame's payload: RESPONSE or STALE
//     CLOSING   the coordinator has left, and this is its reason: the end of all DOWNs (departure.c)
//
// A rank that must stay when it wants to leave (departure.h) says so by an item of its own, LEFT.
#pragma once

#include "core/message/bundle.h"
#include "core/message/frame.h"
#include "core/context/operation.h"
#include "core/context/process_set.h"
#include "core/negotiation/tree.h"

// Where what is relayed ends: requests, from each of these ranks (rising), at the coordinator; frames to this rank.
struct relay_receivers {
    bhvd_status (*up)(bhvd_context *ctx, const int *ranks, int count, struct bytes_reader items);
    bhvd_status (*down)(bhvd_context *ctx, enum frame_type type, struct bytes_reader payload);
};

struct relay {
    const struct relay_receivers *receivers;
    int parent;                         // -1: this rank is the coordinator
    struct tree tree;
    struct bundle bundle;               // of this rank and those below, on the way up
    struct rank_set myself, subtree;    // subtree: and all below, the only ones that what comes down may name
    struct rank_set named, part;        // by the item that is being read; of it, what concerns one child
    int *ranks;                         // the same as a list
    int64_t closing_by_ns;              // the coordinator left, and answers may still be on the way through the parent; 0: it has not
    struct bytes last_words;            // its reason
};

bhvd_status relay_init(bhvd_context *ctx, const struct relay_receivers *receivers);
void relay_fini(bhvd_context *ctx);

// Sends a frame of the negotiation to a rank, unless that has left.
bhvd_status frame_send(bhvd_context *ctx, int rank, enum frame_type type, const struct bytes *payload, bool lazy);
// Appends the operation's whole request to items.
void relay_put_request(bhvd_context *ctx, struct bytes *items, enum item_tag tag, const struct bhvd_handle *op);
// Announces what this rank asks for.
bhvd_status relay_announce(bhvd_context *ctx, const struct bytes *items);
// At the coordinator: a response or notice for the members of a set, this rank last, or for one rank.
bhvd_status relay_send_to_set(bhvd_context *ctx, const struct process_set *set, enum frame_type type,
                              const struct bytes *payload);
bhvd_status relay_send_to(bhvd_context *ctx, int rank, enum frame_type type, const struct bytes *payload);
// Sends what was collected, up and down.
bhvd_status relay_flush(bhvd_context *ctx);

bhvd_status relay_take_up(bhvd_context *ctx, struct link *link, struct bytes_reader payload);
bhvd_status relay_take_down(bhvd_context *ctx, struct link *link, struct bytes_reader payload);
