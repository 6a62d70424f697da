// Negotiation in a tree (docs/decisions/engine.md): ranks send requests to their parent, and receive responses from it. A rank with
// children is a relay: it bundles requests and passes on responses, and neither counts nor knows process sets.
// relay_flush sends them, at the end of each poll of the engine. A star is a tree without relays.
//
//     UP        groups (struct bundle)
//     DOWN      items, each: the set of receivers (none: all below, and the receiver of the frame), u8 frame type, u32 size,
//               that frame's payload: RESPONSE or CACHE_MISS
//     CLOSING   the coordinator has left, with its reason: comes after all DOWNs (departure.c)
//
// A rank that wants to leave but must stay (departure.h) announces that with the item LEFT.
#pragma once

#include "bagua_hvd.h"
#include "core/context/operation.h"
#include "core/context/process_set.h"
#include "core/message/frame.h"
#include "core/message/rank_set.h"

// The shape of the negotiation tree. A rank knows its parent and all ranks below it, but no
// others. Within a host, ranks form a tree of a given fan-out, and so do the first ranks of the hosts; rank 0 is
// the root. A star is a tree of unlimited fan-out: all others are the root's children, and there are no relays.
enum {
    TREE_STAR_RANKS = 64,               // up to this many ranks a star is faster, since it has fewer hops
    TREE_FANOUT = 16,
    TREE_STAR = INT32_MAX               // unlimited fan-out
};

struct tree_child {
    int rank;
    struct rank_set below;              // the child and all ranks below it
    struct bytes out;                   // items for its next message (relay.c)
};

struct tree {
    int parent;                         // -1: the root has none
    int *towards;                       // by rank: the index of the child that is, or relays for, that rank; -1: not below
    struct tree_child *children;
    int child_count;
};

// The final receivers: at the coordinator, of requests from each of these ranks (ascending); of frames to this rank.
struct relay_receivers {
    bhvd_status (*up)(bhvd_context *ctx, const int *ranks, int count, struct bytes_reader items);
    bhvd_status (*down)(bhvd_context *ctx, enum frame_type type, struct bytes_reader payload);
};

// The requests of a relay and the ranks below it, as one message to its parent. Items of each rank keep their order.
// Consecutive equal items share one copy, so the message stays short while all ranks wait for the same operation.
//
//     groups, each: the set of ranks that requested it, u32 size, items (frame.h)
struct bundle {
    struct bytes out;                   // complete groups
    struct bytes items;                 // of the last group, which is not yet in `out`
    struct rank_set ranks;              // that requested them
};

struct relay {
    const struct relay_receivers *receivers;
    struct tree tree;
    struct bundle bundle;               // requests of this rank and the ranks below, not yet sent
    struct rank_set myself, subtree;    // subtree: this rank and all below, the only valid receivers of DOWN items
    struct rank_set named, part;        // ranks of the item being read; those of them below one child
    int *ranks;                         // the ranks of `named` as a list
    int64_t closing_by_ns;              // the coordinator left: wait for the parent's CLOSING until then; 0: it has not
    struct bytes closing_reason;        // the coordinator's reason
};

bhvd_status relay_init(bhvd_context *ctx, const struct relay_receivers *receivers);
void relay_fini(bhvd_context *ctx);

// Sends a frame of the negotiation to a rank, unless the rank has left.
bhvd_status frame_send(bhvd_context *ctx, int rank, enum frame_type type, const struct bytes *payload, bool no_wakeup);
// Appends the operation's full request to items.
void relay_put_request(bhvd_context *ctx, struct bytes *items, enum item_tag tag, const struct bhvd_operation *op);
// Sends this rank's requests.
bhvd_status relay_send_requests(bhvd_context *ctx, const struct bytes *items);
// At the coordinator: sends a response or notice to the members of a set, this rank last, or to one rank.
bhvd_status relay_send_to_set(bhvd_context *ctx, const struct process_set *set, enum frame_type type,
                              const struct bytes *payload);
bhvd_status relay_send_to(bhvd_context *ctx, int rank, enum frame_type type, const struct bytes *payload);
// Sends collected frames, up and down.
bhvd_status relay_flush(bhvd_context *ctx);

bhvd_status relay_on_up(bhvd_context *ctx, struct link *link, struct bytes_reader payload);
bhvd_status relay_on_down(bhvd_context *ctx, struct link *link, struct bytes_reader payload);

// The fan-out that the options request. BHVD_ERR_ARGUMENT: they are invalid.
bhvd_status tree_fanout(const struct bhvd_context_options *options, int *fanout, struct bhvd_error *error);

// Sets each rank's parent, always a lower rank; -1 for the root. False: no memory.
bool tree_parents(const int *host_of, int size, int fanout, int *parents);

// The ranks with which a rank negotiates and exchanges heartbeats: rank 0, its parent, its children. See transport/connect.h.
bool tree_choose(const struct bhvd_context_options *options, const int *host_of, bool *talks_to);

// host_of: by rank, the number of its host, in the order of their first ranks.
bhvd_status tree_init(struct tree *tree, const int *host_of, int size, int rank, int fanout);
void tree_fini(struct tree *tree);

// NULL: not a child.
struct tree_child *tree_child(struct tree *tree, int rank);
// The child that is, or relays for, this rank; NULL: not below.
struct tree_child *tree_child_towards(struct tree *tree, int rank);

// For a job of `size` ranks. False: no memory.
bool bundle_init(struct bundle *bundle, int size);
void bundle_fini(struct bundle *bundle);
// Adds items that each of these ranks requested; they are not parsed.
void bundle_put(struct bundle *bundle, const struct rank_set *from, struct bytes_reader items);
static inline size_t bundle_size(const struct bundle *bundle) { return bundle->out.size + bundle->items.size; }
// No memory, permanently.
static inline bool bundle_failed(const struct bundle *bundle) { return bundle->out.failed || bundle->items.failed; }
// Completes the message in bundle->out, which is valid until bundle_clear.
const struct bytes *bundle_write(struct bundle *bundle);
void bundle_clear(struct bundle *bundle);
