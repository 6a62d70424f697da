// Collectives over links, as schedules (run/schedule.h) of the rank that `schedule` was made for.
// Functions of nothing but their arguments: whoever has these can write down any rank's.
#pragma once

#include "run/schedule.h"

enum { HOP_NS = 27000 };        // of one message: what the ranks themselves need at least, however near the hosts are

static inline double wire_hop_ns(const struct wire *wire) { return wire->hop_ns > HOP_NS ? wire->hop_ns : HOP_NS; }

// From the tensors, loaded into the vector, to the tensors: postscale * sum over ranks. element: bytes.
void schedule_allreduce_ring(struct schedule *schedule, size_t nbytes, size_t element);
void schedule_allreduce_doubling(struct schedule *schedule, size_t nbytes, size_t element);
void schedule_allreduce_halving(struct schedule *schedule, size_t nbytes, size_t element);

// Where chunk `index` of `size` begins, in bytes: the first count % size chunks are one element longer.
static inline size_t vector_chunk(size_t nbytes, size_t element, int index, int size)
{
    size_t count = nbytes / element, at = (size_t)index, longer = count % (size_t)size;
    return (count / (size_t)size * at + (at < longer ? at : longer)) * element;
}

// From input, part[rank] bytes, to output: all parts in rank order.
void schedule_allgather_direct(struct schedule *schedule, const size_t *part);
void schedule_allgather_doubling(struct schedule *schedule, const size_t *part);
// The cheaper of the two. wire, and part, equal on all ranks.
void allgather_schedule(struct schedule *schedule, const struct wire *wire, const size_t *part);
// Parts in rank order, in input those that go to each, in output those that come from each.
void schedule_alltoall(struct schedule *schedule, const size_t *sent, const size_t *received);
// From the vector, all parts in rank order, to output: part[rank] bytes of the sum. loads: the tensors' values come into the
// vector first, else they lie in input. Output may begin where input does.
void schedule_reducescatter(struct schedule *schedule, const size_t *part, bool loads);
// Rounds in which what one of n ranks has reaches all, when those who have it double.
static inline int doubling_rounds(int n)
{
    int rounds = 0;
    while (1 << rounds < n)
        rounds++;
    return rounds;
}

// From the root's input to everybody's output, in a chain or a tree.
void schedule_broadcast(struct schedule *schedule, int root, size_t nbytes, bool chain);
// Whether a chain is the cheaper one. wire equal on all ranks.
bool broadcast_by_chain(int n, const struct wire *wire, size_t nbytes);
