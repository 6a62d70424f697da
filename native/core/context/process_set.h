// Process sets: which ranks take part. Set 0 holds all ranks; ids are equal on all ranks, because sets are added and
// removed in the global order of executions.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "bagua_hvd.h"
#include "executor/group.h"

struct nccl_comm;

enum { PROCESS_SET_MAX = 1024 };

struct process_set {
    struct group group;         // ranks ascending; its id is the public one, reused after a removal
    uint32_t number;            // never reused: used in requests, responses and executions
    struct nccl_comm *nccl;     // gpu/nccl.h; NULL: not agreed on yet
    bool of_members;            // added by its members alone; Python never removes it
    int pairwise_count;         // coordinator: pairwise operations that no longer need it (pairwise.h)
};

struct process_set_table {
    struct process_set *sets[PROCESS_SET_MAX];
    uint64_t generation;        // number of additions: a new set's blocks come after those of any older one
    int high;                   // all ids are below this
};

// The caller holds ctx->sets_lock for all of these, except where the engine reads data that only the engine writes.
struct process_set *process_set_get(const struct process_set_table *table, uint32_t id);
struct process_set *process_set_find(const struct process_set_table *table, uint32_t number);
// The set with the next higher id; NULL: the first. `for (struct process_set *set = NULL; (set = process_set_next(table, set));)`
struct process_set *process_set_next(const struct process_set_table *table, const struct process_set *set);
// The set of exactly these ranks, NULL: none. Sets added by members are separate, so that they survive the removal of
// another set with the same ranks; but there is only one set of all ranks.
struct process_set *process_set_of(const struct process_set_table *table, const int32_t *ranks, int size, bool of_members);
// ranks: ascending. Errors: BHVD_ERR_ARGUMENT for a duplicate set or too many sets, BHVD_ERR_SYSTEM without memory.
bhvd_status process_set_add(struct process_set_table *table, struct executor *exec, const int32_t *ranks, int size,
                            bool of_members, int *id, struct bhvd_error *error);
void process_set_remove(struct process_set_table *table, uint32_t id);
void process_set_table_fini(struct process_set_table *table);
// Position of a global rank in the set, -1 when it is not a member.
int process_set_index(const struct process_set *set, int global_rank);
