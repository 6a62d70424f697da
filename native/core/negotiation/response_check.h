// Does a response fit this rank's request? A rank accepts nothing that would make it read or write
// out of bounds, not even from a peer that knows the secret, which may be broken or of another version.
#pragma once

#include "core/context/context.h"
#include "core/context/operation.h"
#include "core/context/process_set.h"
#include "core/message/request.h"

// How many numbers a response adds for each tensor.
static inline size_t response_count(bhvd_kind kind, int set_size)
{
    return kind == BHVD_ALLGATHER ? (size_t)set_size : kind == BHVD_ALLTOALL ? (size_t)set_size + 1 : 0;
}
// Checks op's response_numbers.
bool response_agrees(const struct process_set *set, const struct bhvd_operation *op);
// May the operation be fused with those that `execution` already has?
bool response_continues(const struct execution *execution, const struct bhvd_operation *op);
// Can this rank take part with zeros?
bool response_has_zeros(const struct request *request);
