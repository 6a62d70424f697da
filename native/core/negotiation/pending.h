// An operation that some members of a process set have requested from the coordinator and others have not; and, once all have,
// checks that they agree, and which operations can be fused. No communication.
#pragma once

#include "core/context/process_set.h"
#include "core/message/request.h"

struct lru_entry;

struct pending {
    struct table_node by_name;
    struct pending *next;                       // in a list of the coordinator (coordinator.h), or in `fused`
    struct FIFO(struct pending) fused;          // in the first of a fusion group: the others,
    size_t fused_nbytes;                        // total size of the group,
    size_t fused_request_nbytes;                // bytes of their requests, an upper bound for the response,
    int fused_count;                            // and number of its operations
    struct operation_key key;                   // name inside a request
    struct process_set *set;                    // freed only after coordinator_set_removed(), or when the executor has failed
    int size;                                   // of the process set
    struct lru_entry *entry;                    // all requests so far used this id; NULL: someone sent a full one
    int64_t since_ns, warned_ns;
    int64_t requested_ns;                       // time of the last request
    int requested_count;                        // number of requests
    bool is_revoked;                            // a member has revoked it (pairwise.h), so others may never request it
    int first;                                  // set rank of the first request
    unsigned char *inline_values;               // values sent with requests (inline_payload.h), from how many members
    int inline_count;
    struct request *requests[];                 // by set rank; NULL: not requested, or joined
};

// Adds it to the table, without any request; `first` (position in the set) will be the first to request it, by `request`. NULL:
// out of memory.
struct pending *pending_create(struct table *table, struct process_set *set, int first, const struct request *request);
// NULL: not requested.
struct pending *pending_find(const struct table *table, const struct operation_key *key);
// The next one in the table, as table_next; NULL: the first.
struct pending *pending_next(const struct table *table, const struct pending *pending);
// Must be in no table.
void pending_free(struct pending *pending);

// Do all members request the same, and can it be done? Members without a request have joined, `last_joined` last.
bhvd_status pending_check(const struct pending *pending, int last_joined, struct bhvd_error *error);
// The operation in progress that uses this entry; NULL: none.
struct pending *pending_of(const struct lru_entry *entry);
// May both be fused? Both have passed the check.
bool pending_is_fusable(const struct pending *one, const struct pending *other);
// Writes the numbers that the response to the member at this position adds to the request, after their count. For alltoall,
// the only kind with different responses per member, longest is pending_longest of each tensor.
void pending_put_numbers(struct bytes *out, const struct pending *pending, int member, const int64_t *longest);
// The largest number of rows of the tensor that any member of an alltoall sends to any member.
int64_t pending_longest(const struct pending *pending, uint32_t tensor);
