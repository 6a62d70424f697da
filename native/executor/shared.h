// Collectives in shared memory work in blocks, each in steps:
//
//     copy in     write this member's piece of the block into its buffer
//     reduce      read the others' buffers, write a reduced part into the own buffer     (allreduce only)
//     copy out    read the others' buffers, write the result
//
// A step of a block begins when the step before it is done on all members. There is no barrier: each member publishes the number of
// blocks that it has copied in, reduced and copied out, and may be ahead of the others by SHM_BUFFERS blocks.
// So a member that is scheduled late does not delay the others as long as they have other blocks to process.
//
// One collective in shared memory is a *pipeline*. Pipelines of one slot run one after the other, in the same order on
// all members; those of different slots are independent. A collective that runs to completion uses slot 0,
// concurrent ones use the others.
#pragma once

#include "executor/collective.h"
#include "executor/group.h"

enum { SHARED_L1_BYTES = 16384 };       // reduced at once, so that the sum stays in the L1 cache

// block: from 0 in each collective; every member calls the same steps for the same blocks, each in ascending order.
struct pipeline;
typedef void (*shared_step_fn)(struct executor *exec, struct pipeline *pipeline, size_t block);

struct shared_steps {
    shared_step_fn copy_in;             // NULL: nothing to write
    shared_step_fn reduce;              // NULL on all members: there is no such step
    shared_step_fn copy_out;            // NULL: nothing to write
    bool only_root;                     // only the member at `root` copies in, and it copies nothing out
    int root;
};

// The function by which a member copies data out, in a collective in which it writes `nbytes` in total.
kernel_copy_fn shared_copy(const struct executor *exec, size_t nbytes);

// A running collective: the first member of its steps' state. Blocks are counted as in the group: from the area's beginning.
struct pipeline {
    struct group *group;
    int slot;
    struct shared_steps steps;
    uint64_t begin, end;
    uint64_t done[SHM_STEPS];           // by this member; `end` for steps that it skips
    uint64_t others[SHM_STEPS];         // the least of all other members, when last read
    int slowest;                        // the member with the least progress then
};

// Only initializes. The previous pipeline in the slot must be over.
void pipeline_begin(struct pipeline *pipeline, struct group *group, int slot, size_t blocks, const struct shared_steps *steps);
// Does one step of a block, if possible.
bool pipeline_advance(struct executor *exec, struct pipeline *pipeline);
// > 0: a step is possible. < 0: none ever will be, since a member has left; the executor has failed.
int pipeline_can_advance(struct executor *exec, struct pipeline *pipeline);
bool pipeline_is_complete(const struct pipeline *pipeline);
// All its steps are done: the slot is free for the next one.
void pipeline_end(struct executor *exec, const struct pipeline *pipeline);
// Does all its steps, and ends it unless an error occurs.
bhvd_status pipeline_execute(struct executor *exec, struct pipeline *pipeline);

// Waits until all members have called it and finished their earlier pipelines.
bhvd_status shared_barrier(struct executor *exec, struct group *group);

// The size of a block of a vector.
static inline size_t shared_block(size_t nbytes, size_t block)
{
    return size_piece(nbytes, block * SHM_BUFFER_BYTES, SHM_BUFFER_BYTES);
}

// Number of blocks for a vector.
static inline size_t shared_blocks(size_t nbytes) { return (nbytes + SHM_BUFFER_BYTES - 1) / SHM_BUFFER_BYTES; }

// The buffer of a member (by its position) for a block, SHM_BUFFER_BYTES long.
unsigned char *shared_buffer(struct executor *exec, const struct pipeline *pipeline, int index, size_t block);

// Copies to `dst`, in this member's buffer, with the faster of two methods: a normal write must first take lines that other
// cores have in their caches, one by one; a non-temporal write need not. Within a chip taking them costs nothing, between chips ten
// times the copy. The distance of the other cores is unknown and changes, so both methods are timed now and then.
void shared_put(struct executor *exec, unsigned char *dst, const void *src, size_t nbytes);

// Copies the next `nbytes` from the cursor on to `dst`, in this member's buffer, prescaled.
void shared_copy_in(struct executor *exec, const struct reduction *reduction, struct span_cursor *cursor, unsigned char *dst,
                  size_t nbytes);

// dst = postscale * reduction over all members' buffers of the block at `offset`, in rank order. own: this member's values,
// if not in its buffer. dst may be own, or lie in the own buffer at the same offset.
void shared_reduce(struct executor *exec, const struct pipeline *pipeline, const struct reduction *reduction, size_t block,
                   size_t offset, const unsigned char *own, unsigned char *dst, size_t nbytes);
