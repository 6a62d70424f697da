// The coordinator: rank 0's second role in negotiation (negotiation.h). It collects requests until all members of the
// process set have asked, checks that they agree, decides what is fused, and answers. Empty on other ranks. Engine only.
//
//     coordinator.c    takes requests, joins and goodbyes
//     ready.c          answers what became complete
//     pending.c        an operation that waits for members; do they agree?
//     response.c       answers as they are written and sent
#ifndef BHVD_COORDINATOR_H
#define BHVD_COORDINATOR_H

#include <pthread.h>

#include "core/message/cached_run.h"
#include "core/negotiation/negotiation.h"
#include "core/negotiation/pending.h"

// What the coordinator has seen of a rank.
struct seen {
    uint64_t operations;                        // that it asked for
    int64_t at_ns;                              // when it did last
    struct request *last;                       // for what; NULL: nothing yet
    _Atomic uint64_t last_asked, waited_ns;     // operations that it was the last to ask for; how long after the last but one
};

// A request for a process set that this rank is still about to add.
struct early_request {
    struct early_request *next;
    int rank;
    struct request *request;
};

// Whom the others wait for, as the last look has found; on rank 0.
struct stalled {
    pthread_mutex_t lock;                       // only the engine writes
    struct bhvd_stalled *ranks;
    int count;
};

struct coordinator {
    struct table pending;
    struct pending *ready_head, **ready_tail;   // complete, in the order of completion, not yet answered
    bool *joined;                               // by global rank
    int joined_count, last_joined;
    bool *left;                                 // by global rank: said goodbye
    int left_count, first_left;
    int additions;                              // process sets answered but not yet added here ...
    struct early_request *early;                // ... and requests for them from ranks that are ahead
    struct seen *seen;                          // by global rank
    int asking;                                 // whose request is being looked at
    int64_t next_stall_check_ns;
    uint64_t response_number;                   // of the response that was begun last
    struct wire wire;                           // to the farthest rank; the slowest line
    size_t nbytes_of[LINK_LANES];               // of the last ones, by number
    struct bytes out;                           // the frame being written
    struct cached_run run;                      // at its end
};

bhvd_status coordinator_init(bhvd_context *ctx);
void coordinator_fini(bhvd_context *ctx);

bhvd_status coordinator_take_requests(bhvd_context *ctx, int rank, struct bytes_reader payload);
// The same, announced by each of these ranks (rising), through relays. The error names the rank.
bhvd_status coordinator_take_bundled(bhvd_context *ctx, const int *ranks, int count, struct bytes_reader items);
// Ends what can no longer complete without this rank.
void coordinator_take_goodbye(bhvd_context *ctx, int rank);
// Answers what became complete.
bhvd_status coordinator_respond(bhvd_context *ctx);

// After a process set was added or removed by an execution: takes the requests that came too early; ends those that wait
// for a set that is gone. Nothing on other ranks.
bhvd_status coordinator_set_added(bhvd_context *ctx);
bhvd_status coordinator_set_removed(bhvd_context *ctx, struct process_set *set);

// Calls visit for every operation that is not complete. visit may end it.
void coordinator_visit(bhvd_context *ctx, void (*visit)(bhvd_context *, struct pending *, void *), void *arg);

// Warns about operations that wait too long for some rank, and ends the job when that was asked for (stall.c). Looks at
// the clock only once a second; does nothing on other ranks.
void stall_check(bhvd_context *ctx);
// A coordinator's frame says that the others wait for this rank.
bhvd_status stall_take_late(bhvd_context *ctx, struct link *link, struct bytes_reader payload);

#endif
