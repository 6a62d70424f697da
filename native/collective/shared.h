// Collectives in shared memory work in blocks. Every member has two slabs in the set's area. For each block:
//
//     every member writes its piece into its current slab;  barrier;  every member reads the others' slabs
//
// The next block goes to the other slab. So one barrier a block is enough: who writes a slab again has passed the barrier
// of the block between, hence all have finished reading it.
#ifndef BHVD_SHARED_H
#define BHVD_SHARED_H

#include "collective/collective.h"

// The current slab of a member (position in the set), HOST_SLAB_BYTES long.
unsigned char *shared_slab(bhvd_context *ctx, const struct process_set *set, int index);

// All members have arrived; what they wrote before is visible.
bhvd_status shared_barrier(bhvd_context *ctx, struct process_set *set);

// Copies the next `nbytes` from the cursor on to `dst`, in this member's slab, prescaled.
void shared_stage(const struct reduction *reduction, struct span_cursor *cursor, unsigned char *dst, size_t nbytes);

// dst = postscale * reduction over all members' current slabs at `offset`, in rank order. dst may lie in the own slab
// at the same offset.
void shared_reduce(bhvd_context *ctx, const struct process_set *set, const struct reduction *reduction, size_t offset,
                   unsigned char *dst, size_t nbytes);

// The block is read: the next one goes to the other slab.
void shared_next_block(struct process_set *set);

#endif
