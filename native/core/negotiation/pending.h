// An operation that some members of a process set asked the coordinator for and others not yet; and, once all have,
// whether they ask for the same and what goes together with what. No communication.
#pragma once

#include "core/context/process_set.h"
#include "core/message/request.h"

struct cached;

struct pending {
    struct table_node by_name;
    struct pending *next_ready;                 // ready.h
    struct pending *next_fused, **fused_tail;   // executed with it; of a head: where the last one ends,
    size_t fused_nbytes;                        // how much it is with all of them,
    size_t fused_request_nbytes;                // bytes of their requests, more than their answer takes
    int fused_count;                            // and how many, itself included
    struct operation_key key;                   // name inside a request
    int size;                                   // of the process set
    struct cached *entry;            // all so far asked by this id; NULL: someone asked in full
    int64_t since_ns, warned_ns;
    int64_t asked_ns;                           // when a member asked last
    int ready_count;
    bool is_revoked;                            // a member has revoked it (pairwise.h), so others may never ask
    int first;                                  // set rank that asked first
    unsigned char *inline_values;               // values that came with requests (inline_payload.h), and of how many members
    int inline_count;
    struct request *requests[];                 // by set rank; NULL: has not asked, or has joined
};

// Enters it into the table, without any request: the first to ask is `first` (position in the set), for `request`. NULL:
// out of memory.
struct pending *pending_create(struct table *table, const struct process_set *set, int first,
                               const struct request *request);
// NULL: nobody asked.
struct pending *pending_find(const struct table *table, const struct operation_key *key);
// The one after this of those in the table, as table_next; NULL: the first.
struct pending *pending_next(const struct table *table, const struct pending *pending);
// It is in no table any more.
void pending_free(struct pending *pending);

// Do all members ask for the same, and can it be done? Those that have not asked have joined, `last_joined` as the last.
bhvd_status pending_check(const struct pending *pending, const struct process_set *set, int last_joined,
                          struct bhvd_error *error);
// The one that is in progress under this agreement; NULL: none.
struct pending *pending_of(const struct cached *agreement);
// May both be executed as one? Both passed the check.
bool pending_is_fusable(const struct pending *one, const struct pending *other);
// What the response to the member at this position adds to the request, its length before it. Of an alltoall,
// which alone tells members different things, longest is pending_longest of each tensor.
void pending_put_agreed(struct bytes *out, const struct pending *pending, int member, const int64_t *longest);
// The largest number of rows of the tensor that any member of an alltoall sends to any.
int64_t pending_longest(const struct pending *pending, uint32_t tensor);
