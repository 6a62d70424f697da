// A set of global ranks, as bits. Wire: u32 ranges, for each: u32 first, u32 count; ascending, not adjacent.
#pragma once

#include "base/bytes.h"

struct rank_set {
    uint64_t *words;
    int size;                   // ranks of the job
};

// Initializes an empty set. False: no memory.
bool rank_set_init(struct rank_set *set, int size);
void rank_set_fini(struct rank_set *set);

static inline void rank_set_add(struct rank_set *set, int rank) { set->words[rank / 64] |= UINT64_C(1) << rank % 64; }
static inline bool rank_set_has(const struct rank_set *set, int rank) { return set->words[rank / 64] >> rank % 64 & 1; }

void rank_set_clear(struct rank_set *set);
// All sets of one job have the same size.
void rank_set_copy(struct rank_set *set, const struct rank_set *other);
void rank_set_unite(struct rank_set *set, const struct rank_set *other);
void rank_set_intersect(struct rank_set *set, const struct rank_set *other);
bool rank_set_is_empty(const struct rank_set *set);
bool rank_set_equals(const struct rank_set *set, const struct rank_set *other);
bool rank_set_overlaps(const struct rank_set *set, const struct rank_set *other);
bool rank_set_contains(const struct rank_set *set, const struct rank_set *other);
// The first member >= `rank`, -1: none. `for (int r = rank_set_next(s, 0); r >= 0; r = rank_set_next(s, r + 1))`
int rank_set_next(const struct rank_set *set, int rank);

void rank_set_put(struct bytes *out, const struct rank_set *set);
// Marks the reader as failed if the set is malformed or names a rank outside the job.
void rank_set_take(struct bytes_reader *r, struct rank_set *set);
