// Process sets: which ranks take part. Set 0 holds all ranks; ids are equal on all ranks, because sets are added and
// removed in the one order of executions.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "bagua_hvd.h"
#include "run/group.h"

struct nccl_group;

enum { PROCESS_SET_MAX = 1024 };

struct process_set {
    struct group group;         // ranks rising; its id is the user's, reused after a removal
    uint32_t number;            // never reused: what requests, answers and executions say
    struct nccl_group *nccl;    // gpu/nccl.h; NULL: not agreed on yet
    bool of_members;            // they alone have asked for it, and nobody removes it
    int persistent;             // coordinator: pairwise operations that it answers no more (pairwise.h)
};

struct process_set_table {
    struct process_set *sets[PROCESS_SET_MAX];
    uint64_t generation;        // counts additions: a new set's blocks are later than any of an older one
    int high;                   // no set has an id from here on
};

// All under ctx->sets_lock by the caller, except where the engine reads what only the engine writes.
struct process_set *process_set_get(const struct process_set_table *table, uint32_t id);
struct process_set *process_set_find(const struct process_set_table *table, uint32_t number);
// The set of exactly these ranks, NULL: there is none. Members have their own, so that a removal leaves it to them; but
// all have one set of all ranks.
struct process_set *process_set_of(const struct process_set_table *table, const int32_t *ranks, int size, bool of_members);
// ranks rising. Errors: BHVD_ERR_ARGUMENT for a duplicate set or too many sets, BHVD_ERR_SYSTEM without memory.
bhvd_status process_set_add(struct process_set_table *table, struct run *run, const int32_t *ranks, int size,
                            bool of_members, int *id, struct bhvd_error *error);
void process_set_remove(struct process_set_table *table, uint32_t id);
void process_set_table_fini(struct process_set_table *table);
// Position of a global rank in the set, -1 when it is not a member.
int process_set_index(const struct process_set *set, int global_rank);
