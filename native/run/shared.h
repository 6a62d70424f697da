// Collectives in shared memory work in blocks, each in steps:
//
//     stage      write this member's piece of the block into its staging buffer
//     reduce     read the others' staging buffers, write what all need into the own staging buffer     (allreduce only)
//     collect    read the others' staging buffers, write the result
//
// A step of a block begins when the step before it is done on all members. There is no barrier: each member counts the
// blocks that it has staged, reduced and collected, where all see it, and may be ahead of the others by HOST_STAGING_BUFFERS blocks.
// So a member that gets its core late costs the others nothing as long as they have something else to do.
//
// A collective's way through the staging buffers is a *pipeline*. Those of one lane follow each other in the same order on all members;
// those of different lanes know nothing of each other. What runs to its end uses lane 0, what goes on beside others one of the rest.
#pragma once

#include "run/span.h"
#include "run/group.h"
#include "run/reduction.h"

enum { SHARED_L1_BYTES = 16384 };       // what is reduced at once, so that the sum stays in the L1 cache

// block: from 0 in each collective; every member calls the same steps for the same blocks, each in rising order.
struct pipeline;
typedef void (*shared_step_fn)(struct run *run, struct pipeline *pipeline, size_t block);

struct shared_steps {
    shared_step_fn stage;               // NULL: nothing to write
    shared_step_fn reduce;              // NULL on all members: there is no such step
    shared_step_fn collect;             // NULL: nothing to write
    bool only_root;                     // nobody stages but the member at `root`, who collects nothing
    int root;
};

// How a member copies what it has collected, of a collective in which it writes `nbytes` in all.
kernel_copy_fn shared_copy(const struct run *run, size_t nbytes);

// A collective under way: the first member of what its steps need. Blocks are counted as in the group: since the area's beginning.
struct pipeline {
    struct group *group;
    int lane;
    struct shared_steps steps;
    uint64_t begin, end;
    uint64_t done[HOST_COUNTS];         // by this member; `end` for what it need not do
    uint64_t others[HOST_COUNTS];       // by all other members, when last looked at
    int slowest;                        // the member that was the least far then
};

// Does nothing yet. The one before it in the lane is over.
void pipeline_begin(struct pipeline *pipeline, struct group *group, int lane, size_t blocks, const struct shared_steps *steps);
// Does one step of a block, if one may be done now.
bool pipeline_advance(struct run *run, struct pipeline *pipeline);
// > 0: one may be done. < 0: none ever will, since a member has left; the run has failed.
int pipeline_can_advance(struct run *run, struct pipeline *pipeline);
bool pipeline_is_over(const struct pipeline *pipeline);
// All its steps are done: the lane is free for the next one.
void pipeline_end(struct run *run, const struct pipeline *pipeline);
// Does all its steps, and ends it. On an error it is not ended.
bhvd_status pipeline_run(struct run *run, struct pipeline *pipeline);

// All members have come here, and have finished what they did before.
bhvd_status shared_barrier(struct run *run, struct group *group);

// How much of a vector of `total` bytes lies in the piece of at most `most` bytes that begins at `offset`.
static inline size_t shared_piece(size_t total, size_t offset, size_t most)
{
    return total <= offset ? 0 : total - offset < most ? total - offset : most;
}

// How many blocks of one staging buffer a vector takes.
static inline size_t shared_blocks(size_t nbytes) { return (nbytes + HOST_STAGING_BUFFER_BYTES - 1) / HOST_STAGING_BUFFER_BYTES; }

// The staging buffer of a member (by its position) for a block of the pipeline that a step is being done of, HOST_STAGING_BUFFER_BYTES
// long.
unsigned char *shared_staging_buffer(struct run *run, const struct group *group, int index, size_t block);

// Copies to `dst`, in this member's staging buffer, in the way that is the quicker one: what other cores have in their caches must be taken
// from them first, line by line, unless it is written past all caches. Within a chip that is nothing, between chips ten times
// the copy. How far the others' cores are nobody knows, and it changes: so now and then both ways are timed.
void shared_put(struct run *run, unsigned char *dst, const void *src, size_t nbytes);

// Copies the next `nbytes` from the cursor on to `dst`, in this member's staging buffer, prescaled.
void shared_stage(struct run *run, const struct reduction *reduction, struct span_cursor *cursor, unsigned char *dst,
                  size_t nbytes);

// dst = postscale * reduction over all members' staging buffers of the block at `offset`, in rank order. own: this member's values, if
// not in its staging buffer. dst may be own, or lie in the own staging buffer at the same offset.
void shared_reduce(struct run *run, const struct group *group, const struct reduction *reduction, size_t block,
                   size_t offset, const unsigned char *own, unsigned char *dst, size_t nbytes);
