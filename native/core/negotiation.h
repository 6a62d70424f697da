// Negotiation: ranks match operations by name, whatever the order they post them in. Event-driven:
//
//     member       posts -> REQUEST (in full, or just the id of a cached agreement) -> coordinator (rank 0)
//     coordinator  when the last member has asked: checks that all ask for the same, decides what is fused
//                  -> RESPONSE to every member
//     member       puts the responses, in the order they come, into its list of executions
//
// There is one coordinator for all process sets, so there is one global order of responses, and every rank executes its
// part of it in that order: the earliest unfinished execution has all its members free for it, hence no deadlock.
//
// What a response adds to the request ("agreed"): allgather: dim 0 of each tensor on each rank, [tensor][set rank];
// alltoall: the split matrix, [tensor][from][to]; join: the rank that joined last; others: nothing.
#ifndef BHVD_NEGOTIATION_H
#define BHVD_NEGOTIATION_H

#include "base/table.h"
#include "core/request.h"

struct link;

#define JOIN_NAME "join"        // every rank's join has this name

enum frame_type { FRAME_REQUEST = 1, FRAME_RESPONSE = 2, FRAME_STALE = 3, FRAME_GOODBYE = 4 };

// One operation that some members asked for and others not yet.
struct pending {
    struct table_node by_name;
    struct pending *next_ready;
    struct operation_key key;                   // name inside a request
    int size;                                   // of the process set
    struct coordinator_entry *entry;            // all so far asked by this id; NULL: someone asked in full
    int64_t since_ns, warned_ns;
    int ready_count;
    int first;                                  // set rank that asked first
    struct request *requests[];                 // by set rank
};

// A request for a process set that this rank is still about to add.
struct early_request {
    struct early_request *next;
    int rank;
    struct request *request;
};

// Coordinator only, but for `out`.
struct negotiation {
    struct table pending;
    struct pending *ready_head, **ready_tail;   // complete, in the order of completion, not yet answered
    bool *joined;                               // by global rank
    int joined_count, last_joined;
    bool *left;                                 // by global rank: said goodbye
    int left_count;
    int additions;                              // process sets answered but not yet added here ...
    struct early_request *early;                // ... and requests for them from ranks that are ahead
    bool said_goodbye;
    int64_t next_stall_check_ns;
    struct bytes out;                           // the frame being written
};

// Some fused operations that are executed together.
struct execution {
    struct execution *next;
    uint32_t process_set;       // the set may be gone when its turn comes: looked up then
    int count;
    struct bhvd_handle *operations[];
};

bhvd_status negotiation_init(bhvd_context *ctx);
void negotiation_fini(bhvd_context *ctx);

// Announces operations that this rank posted (a list linked by `next`).
bhvd_status negotiation_request(bhvd_context *ctx, struct bhvd_handle *posted);
// A frame from a peer.
bhvd_status negotiation_frame(bhvd_context *ctx, struct link *link, uint8_t type, struct bytes_reader payload);
// Coordinator: answers what became complete.
bhvd_status negotiation_respond(bhvd_context *ctx);
// Says goodbye to all peers, once: this rank takes part in nothing any more. When it failed, it says why, so that all
// ranks name the same cause.
void negotiation_leave(bhvd_context *ctx);
// After a process set was added or removed by an execution. Coordinator: takes the requests that came too early, ends
// those that wait for a set that is gone.
bhvd_status negotiation_set_added(bhvd_context *ctx);
bhvd_status negotiation_set_removed(bhvd_context *ctx, uint32_t process_set);
// Coordinator: calls visit for every operation that is not complete. visit may end it.
void negotiation_visit(bhvd_context *ctx, void (*visit)(bhvd_context *, struct pending *, void *), void *arg);

// Coordinator: warns about operations that wait too long for some rank, and ends the job when that was asked for
// (stall.c). Looks at the clock only once a second; does nothing on other ranks.
void stall_check(bhvd_context *ctx);

#endif
