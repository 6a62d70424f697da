// Collectives over links, as schedules (executor/schedule.h) of the rank that `schedule` was made for. These functions depend
// only on their arguments, so any rank's schedule can be computed anywhere.
#pragma once

#include "executor/schedule.h"

enum { ALPHA_MIN_NS = 27000 };  // per message: the ranks' own overhead, a lower bound however close the hosts are

static inline double network_alpha_ns(const struct network_cost *network)
{
    return network->alpha_ns > ALPHA_MIN_NS ? network->alpha_ns : ALPHA_MIN_NS;
}

// From the tensors, loaded into the vector, to the tensors: postscale * sum over ranks. element: its size in bytes.
void schedule_allreduce_ring(struct schedule *schedule, size_t nbytes, size_t element);
void schedule_allreduce_doubling(struct schedule *schedule, size_t nbytes);
void schedule_allreduce_halving(struct schedule *schedule, size_t nbytes, size_t element);

// Where chunk `index` of `size` begins, in bytes: the first count % size chunks are one element longer.
static inline size_t vector_chunk(size_t nbytes, size_t element, int index, int size)
{
    size_t count = nbytes / element, at = (size_t)index, longer = count % (size_t)size;
    return (count / (size_t)size * at + (at < longer ? at : longer)) * element;
}

// From input (part[rank] bytes) to output (all parts in rank order).
void schedule_allgather_direct(struct schedule *schedule, const size_t *part);
void schedule_allgather_bruck(struct schedule *schedule, const size_t *part);
// Picks the cheaper of the two. network and part must be equal on all ranks.
void allgather_schedule(struct schedule *schedule, const struct network_cost *network, const size_t *part);
// Parts are in rank order: in input by receiver, in output by sender.
void schedule_alltoall(struct schedule *schedule, const size_t *sent, const size_t *received);
// From the vector, all parts in rank order, to output: part[rank] bytes of the sum. loads: the tensors' values are loaded into the
// vector first; otherwise they are read from input. Output may begin where input does.
void schedule_reducescatter(struct schedule *schedule, const size_t *part, bool loads);
// Rounds until all n ranks have a value, if the number that have it doubles in each round.
static inline int doubling_rounds(int n)
{
    int rounds = 0;
    while (1 << rounds < n)
        rounds++;
    return rounds;
}

// From the root's input to every output, along a chain or a tree.
void schedule_broadcast(struct schedule *schedule, int root, size_t nbytes, bool chain);
// Whether a chain is cheaper. network must be equal on all ranks.
bool broadcast_by_chain(int n, const struct network_cost *network, size_t nbytes);
