#include "executor/shared.h"

#include "base/clock.h"

enum {
    LONG_BYTES = 8 << 20,       // a longer result is no longer in the caches when it is used
    STREAMED_BYTES = 4096,      // not for shorter copies: non-temporal stores become visible some 100 ns later
    TIMED_BYTES = 32 << 10,     // reading the clock twice is negligible from this size on
    TIMED_EVERY = 512, TIMED_FROM = 64, TIMED = 8,  // writes 64 to 71 of every 512 are timed; not the first, into untouched pages
    WORTH_IT = 4                // required speed-up, since readers then find the data in no cache
};

static struct shm_progress *progress_of(struct executor *exec, const struct pipeline *pipeline, int index)
{
    return shm_segment_progress(&exec->connections.shm, pipeline->group->id, pipeline->slot, pipeline->group->local_indices[index]);
}

static uint64_t count_of(struct executor *exec, const struct pipeline *pipeline, int index, enum shm_step step)
{
    uint64_t done = atomic_load(&progress_of(exec, pipeline, index)->done[step]), first = pipeline->group->first_block;
    return done > first ? done : first;         // the area may have been another set's
}

unsigned char *shared_buffer(struct executor *exec, const struct pipeline *pipeline, int index, size_t block)
{
    return shm_segment_buffer(&exec->connections.shm, pipeline->group->id, pipeline->slot, pipeline->group->local_indices[index],
                              (int)((pipeline->begin + block) % SHM_BUFFERS));
}

// The step that all members must have finished before one may begin `step` with the same block; to copy in, which reuses a
// buffer, with the block SHM_BUFFERS earlier.
static enum shm_step before(const struct pipeline *pipeline, enum shm_step step)
{
    switch (step) {
    case SHM_COPIED_IN:
        return SHM_COPIED_OUT;
    case SHM_REDUCED:
        return SHM_COPIED_IN;
    default:
        return pipeline->steps.reduce ? SHM_REDUCED : SHM_COPIED_IN;
    }
}

// A member may begin the step with a block below this, if a member that it depends on has done `done` blocks of the previous step.
static uint64_t limit(enum shm_step step, uint64_t done) { return step == SHM_COPIED_IN ? done + SHM_BUFFERS : done; }

static bool needs(const struct pipeline *pipeline, int index, enum shm_step step)
{
    return index != pipeline->group->rank &&
           (!pipeline->steps.only_root || step == SHM_COPIED_IN || index == pipeline->steps.root);
}

static void look_at_others(struct executor *exec, struct pipeline *pipeline, enum shm_step step)
{
    const enum shm_step needed = before(pipeline, step);
    uint64_t least = UINT64_MAX;
    for (int i = 0; i < pipeline->group->size; i++) {
        if (!needs(pipeline, i, step))
            continue;
        uint64_t done = count_of(exec, pipeline, i, needed);
        if (done < least) {
            least = done;
            pipeline->slowest = i;
        }
    }
    pipeline->others[needed] = least == UINT64_MAX ? pipeline->end : least;
}

static bool may_begin(struct executor *exec, struct pipeline *pipeline, enum shm_step step)
{
    const enum shm_step needed = before(pipeline, step);
    const uint64_t block = pipeline->done[step];
    if (block == pipeline->end || block >= limit(step, pipeline->done[needed]))
        return false;
    if (block >= limit(step, pipeline->others[needed]))
        look_at_others(exec, pipeline, step);
    return block < limit(step, pipeline->others[needed]);
}

// Wakes members that may sleep until this step. Their counts show which: they store them before they check ours.
static void publish(struct executor *exec, struct pipeline *pipeline, enum shm_step step)
{
    struct group *group = pipeline->group;
    const uint64_t block = pipeline->done[step]++;
    const enum shm_step next = step == SHM_COPIED_OUT                            ? SHM_COPIED_IN
                               : step == SHM_COPIED_IN && pipeline->steps.reduce ? SHM_REDUCED
                                                                                 : SHM_COPIED_OUT;
    atomic_store(&progress_of(exec, pipeline, group->rank)->done[step], pipeline->done[step]);
    for (int i = 0; i < group->size; i++) {
        if (i != group->rank && count_of(exec, pipeline, i, next) >= limit(next, block))
            doorbell_ring(&group_link(exec, group, i)->doorbell, 0);
    }
}

// Does the next block of the step wait for a member that has left? Its counts are then final.
static bool waits_for_departed(struct executor *exec, struct pipeline *pipeline, enum shm_step step, int *who)
{
    for (int i = 0; i < pipeline->group->size && pipeline->done[step] < pipeline->end; i++) {
        if (needs(pipeline, i, step) && group_link(exec, pipeline->group, i)->state == LINK_DEPARTED &&
            pipeline->done[step] >= limit(step, count_of(exec, pipeline, i, before(pipeline, step)))) {
            *who = i;
            return true;
        }
    }
    return false;
}

int pipeline_can_advance(struct executor *exec, struct pipeline *pipeline)
{
    int who = 0;
    for (int step = 0; step < SHM_STEPS; step++) {
        if (may_begin(exec, pipeline, (enum shm_step)step))
            return 1;
    }
    for (int step = 0; step < SHM_STEPS; step++) {
        if (waits_for_departed(exec, pipeline, (enum shm_step)step, &who)) {
            executor_fail_departed(exec, pipeline->group->ranks[who]);
            return -1;
        }
    }
    return 0;
}

bool pipeline_is_complete(const struct pipeline *pipeline)
{
    return pipeline->done[SHM_COPIED_IN] == pipeline->end && pipeline->done[SHM_REDUCED] == pipeline->end &&
           pipeline->done[SHM_COPIED_OUT] == pipeline->end;
}

void pipeline_begin(struct pipeline *pipeline, struct group *group, int slot, size_t blocks, const struct shared_steps *steps)
{
    const uint64_t begin = group->block[slot], end = begin + blocks;
    *pipeline = (struct pipeline){.group = group, .slot = slot, .steps = *steps, .begin = begin, .end = end,
                                .done = {begin, steps->reduce ? begin : end, begin}};
    if (steps->only_root)
        pipeline->done[group->rank == steps->root ? SHM_COPIED_OUT : SHM_COPIED_IN] = end;
}

bool pipeline_advance(struct executor *exec, struct pipeline *pipeline)
{
    const shared_step_fn functions[SHM_STEPS] = {pipeline->steps.copy_in, pipeline->steps.reduce, pipeline->steps.copy_out};
    int step = SHM_COPIED_OUT;          // last step first: its data was read or written just now and is in the cache
    while (step >= 0 && !may_begin(exec, pipeline, (enum shm_step)step))
        step--;
    if (step < 0)
        return false;
    if (functions[step])
        functions[step](exec, pipeline, (size_t)(pipeline->done[step] - pipeline->begin));
    publish(exec, pipeline, (enum shm_step)step);
    return true;
}

void pipeline_end(struct executor *exec, const struct pipeline *pipeline)
{
    struct group *group = pipeline->group;
    // Also sets counts of steps that this member skips: others read its progress from them.
    for (int step = 0; step < SHM_STEPS; step++)
        atomic_store(&progress_of(exec, pipeline, group->rank)->done[step], pipeline->end);
    // The root of a broadcast copies nothing out, so no one was woken by that step: a member may wait for it before it copies in.
    for (int i = 0; i < group->size && pipeline->steps.only_root && group->rank == pipeline->steps.root; i++) {
        if (i != group->rank)
            doorbell_ring(&group_link(exec, group, i)->doorbell, 0);
    }
    group->block[pipeline->slot] = pipeline->end;
}

static int can_advance(struct executor *exec, void *pipeline) { return pipeline_can_advance(exec, pipeline); }

bhvd_status pipeline_execute(struct executor *exec, struct pipeline *pipeline)
{
    bhvd_status status = BHVD_OK;
    while (!status && !pipeline_is_complete(pipeline)) {
        if (!pipeline_advance(exec, pipeline))
            status = executor_wait(exec, can_advance, pipeline, pipeline->group->ranks[pipeline->slowest]);
    }
    if (!status)
        pipeline_end(exec, pipeline);
    return status;
}

kernel_copy_fn shared_copy(const struct executor *exec, size_t nbytes)
{
    return nbytes > LONG_BYTES ? exec->kernels.long_copy : span_copy;
}

bhvd_status shared_barrier(struct executor *exec, struct group *group)
{
    struct pipeline pipeline;
    pipeline_begin(&pipeline, group, 0, 1, &(struct shared_steps){0});
    return pipeline_execute(exec, &pipeline);
}

static void copy_timed(struct executor *exec, unsigned char *dst, const void *src, size_t nbytes, bool streamed)
{
    int64_t *least_ns = &exec->writes.least_ns[streamed];
    const int64_t start_ns = clock_now_ns();
    (streamed ? exec->kernels.streamed_copy : span_copy)(dst, src, nbytes);
    const int64_t ns = (clock_now_ns() - start_ns) * (1 << 20) / (int64_t)nbytes;
    *least_ns = *least_ns && *least_ns < ns ? *least_ns : ns;
}

void shared_put(struct executor *exec, unsigned char *dst, const void *src, size_t nbytes)
{
    struct writes *writes = &exec->writes;
    const uint32_t turn = nbytes >= TIMED_BYTES ? writes->count++ % TIMED_EVERY - TIMED_FROM : TIMED;
    if (turn < TIMED && exec->kernels.streamed_copy) {
        copy_timed(exec, dst, src, nbytes, turn % 2);
        if (turn == TIMED - 1) {
            writes->streamed = writes->least_ns[0] > WORTH_IT * writes->least_ns[1];
            writes->least_ns[0] = writes->least_ns[1] = 0;
        }
    } else {
        (writes->streamed && nbytes >= STREAMED_BYTES ? exec->kernels.streamed_copy : span_copy)(dst, src, nbytes);
    }
}

void shared_copy_in(struct executor *exec, const struct reduction *reduction, struct span_cursor *cursor, unsigned char *dst,
                  size_t nbytes)
{
    const size_t element = bhvd_dtype_size(reduction->dtype);
    const bool scales = reduction->prescale != 1.0;
    _Alignas(64) unsigned char scaled[SHARED_L1_BYTES];
    for (struct span s; (s = span_cursor_next(cursor, scales ? size_min(nbytes, SHARED_L1_BYTES) : nbytes)).nbytes;
         nbytes -= s.nbytes, dst += s.nbytes) {
        if (scales)
            reduction->scale(scaled, s.src, reduction->prescale, s.nbytes / element);
        shared_put(exec, dst, scales ? scaled : s.src, s.nbytes);
    }
}

static const unsigned char *values_of(struct executor *exec, const struct pipeline *pipeline, int index, size_t block,
                                      size_t offset, const unsigned char *own)
{
    return own && index == pipeline->group->rank ? own : shared_buffer(exec, pipeline, index, block) + offset;
}

void shared_reduce(struct executor *exec, const struct pipeline *pipeline, const struct reduction *reduction, size_t block,
                   size_t offset, const unsigned char *own, unsigned char *dst, size_t nbytes)
{
    const size_t element = bhvd_dtype_size(reduction->dtype);
    const int members = pipeline->group->size;
    _Alignas(64) unsigned char partial[SHARED_L1_BYTES];
    while (nbytes) {
        size_t n = size_min(nbytes, SHARED_L1_BYTES), count = n / element;
        // The last reduction writes to dst; own values may be overwritten only then, since dst may be own.
        const unsigned char *sum = values_of(exec, pipeline, 0, block, offset, own);
        if (members == 1)
            memmove(dst, sum, n);
        for (int i = 1; i < members; i++) {
            unsigned char *to = i == members - 1 ? dst : partial;
            reduction->reduce(to, sum, values_of(exec, pipeline, i, block, offset, own), count);
            sum = to;
        }
        if (reduction->postscale != 1.0)
            reduction->scale(dst, dst, reduction->postscale, count);
        offset += n;
        own = own ? own + n : NULL;
        dst += n;
        nbytes -= n;
    }
}
