#include "collective/shared.h"

#include "core/progress.h"

enum {
    LONG_BYTES = 8 << 20        // a longer result is not in the caches when it is used
};

// A collective under way. Blocks are counted as in the set: since the area's beginning.
struct run {
    struct process_set *set;
    const struct shared_steps *steps;
    uint64_t end;
    uint64_t done[HOST_COUNTS];         // by this member; `end` for what it need not do
    uint64_t others[HOST_COUNTS];       // by all other members, when last looked at
    int slowest;                        // the member that was the least far then
};

static struct host_counts *counts_of(bhvd_context *ctx, const struct process_set *set, int index)
{
    return host_memory_counts(&ctx->connections.host, set->id, set->local_indices[index]);
}

static uint64_t count_of(bhvd_context *ctx, const struct process_set *set, int index, enum host_count count)
{
    uint64_t done = atomic_load(&counts_of(ctx, set, index)->done[count]);
    return done > set->first_block ? done : set->first_block;       // the area may have been another set's
}

unsigned char *shared_slab(bhvd_context *ctx, const struct process_set *set, int index, size_t block)
{
    return host_memory_slab(&ctx->connections.host, set->id, set->local_indices[index],
                            (int)((set->block + block) % HOST_SLABS));
}

// The step that must have been done, by all, before one may begin with the same block; for staging, which begins with a
// slab anew, with the block HOST_SLABS before.
static enum host_count before(const struct run *run, enum host_count step)
{
    switch (step) {
    case HOST_STAGED:
        return HOST_COLLECTED;
    case HOST_REDUCED:
        return HOST_STAGED;
    default:
        return run->steps->reduce ? HOST_REDUCED : HOST_STAGED;
    }
}

// A member may begin the step with a block below this, when one that it needs has done `done` blocks of the step before.
static uint64_t limit(enum host_count step, uint64_t done) { return step == HOST_STAGED ? done + HOST_SLABS : done; }

static bool needs(const struct run *run, int index, enum host_count step)
{
    return index != run->set->rank &&
           (!run->steps->only_root || step == HOST_STAGED || index == run->steps->root);
}

static void look_at_others(bhvd_context *ctx, struct run *run, enum host_count step)
{
    const enum host_count needed = before(run, step);
    uint64_t least = UINT64_MAX;
    for (int i = 0; i < run->set->size; i++) {
        if (!needs(run, i, step))
            continue;
        uint64_t done = count_of(ctx, run->set, i, needed);
        if (done < least) {
            least = done;
            run->slowest = i;
        }
    }
    run->others[needed] = least == UINT64_MAX ? run->end : least;
}

static bool may_begin(bhvd_context *ctx, struct run *run, enum host_count step)
{
    const enum host_count needed = before(run, step);
    const uint64_t block = run->done[step];
    if (block == run->end || block >= limit(step, run->done[needed]))
        return false;
    if (block >= limit(step, run->others[needed]))
        look_at_others(ctx, run, step);
    return block < limit(step, run->others[needed]);
}

// Wakes whoever may be asleep for want of this very step. Its own counts tell: it has stored them before it looked.
static void publish(bhvd_context *ctx, struct run *run, enum host_count step)
{
    struct process_set *set = run->set;
    const uint64_t block = run->done[step]++;
    const enum host_count next = step == HOST_COLLECTED                        ? HOST_STAGED
                                 : step == HOST_STAGED && run->steps->reduce ? HOST_REDUCED
                                                                               : HOST_COLLECTED;
    atomic_store(&counts_of(ctx, set, set->rank)->done[step], run->done[step]);
    for (int i = 0; i < set->size; i++) {
        if (i != set->rank && count_of(ctx, set, i, next) >= limit(next, block))
            bell_ring(&collective_link(ctx, set, i)->bell, 0);
    }
}

// Does the next block of the step wait for a member that has left? What it has done is final then.
static bool waits_for_left(bhvd_context *ctx, struct run *run, enum host_count step, int *who)
{
    for (int i = 0; i < run->set->size && run->done[step] < run->end; i++) {
        if (needs(run, i, step) && collective_link(ctx, run->set, i)->state == LINK_LEFT &&
            run->done[step] >= limit(step, count_of(ctx, run->set, i, before(run, step)))) {
            *who = i;
            return true;
        }
    }
    return false;
}

static int some_may_begin(bhvd_context *ctx, void *arg)
{
    struct run *run = arg;
    int who = 0;
    for (int step = 0; step < HOST_COUNTS; step++) {
        if (may_begin(ctx, run, (enum host_count)step))
            return 1;
    }
    for (int step = 0; step < HOST_COUNTS; step++) {
        if (waits_for_left(ctx, run, (enum host_count)step, &who)) {
            context_fail(ctx, BHVD_ERR_PEER_LOST, "rank %d left the job while an operation still needed it",
                         run->set->ranks[who]);
            return -1;
        }
    }
    return 0;
}

static bool is_over(const struct run *run)
{
    return run->done[HOST_STAGED] == run->end && run->done[HOST_REDUCED] == run->end &&
           run->done[HOST_COLLECTED] == run->end;
}

bhvd_status shared_run(bhvd_context *ctx, struct process_set *set, size_t blocks, const struct shared_steps *steps,
                       void *arg)
{
    const shared_step_fn functions[HOST_COUNTS] = {steps->stage, steps->reduce, steps->collect};
    const bool is_root = set->rank == steps->root;
    struct run run = {.set = set, .steps = steps, .end = set->block + blocks};
    bhvd_status status = BHVD_OK;
    for (int step = 0; step < HOST_COUNTS; step++)
        run.done[step] = set->block;
    if (!steps->reduce)
        run.done[HOST_REDUCED] = run.end;
    if (steps->only_root)
        run.done[is_root ? HOST_COLLECTED : HOST_STAGED] = run.end;
    while (!status && !is_over(&run)) {
        int step = HOST_COLLECTED;      // the last one first: what was read or written just now is in the cache
        while (step >= 0 && !may_begin(ctx, &run, (enum host_count)step))
            step--;
        if (step < 0) {
            status = progress_until(ctx, some_may_begin, &run, set->ranks[run.slowest]);
            continue;
        }
        if (functions[step])
            functions[step](arg, (size_t)(run.done[step] - set->block));
        publish(ctx, &run, (enum host_count)step);
    }
    // Also what this member did not do itself: from its counts the others know where it stands.
    for (int step = 0; step < HOST_COUNTS && !status; step++)
        atomic_store(&counts_of(ctx, set, set->rank)->done[step], run.end);
    set->block = run.end;
    return status;
}

kernel_copy_fn shared_copy(const bhvd_context *ctx, size_t nbytes)
{
    return nbytes > LONG_BYTES ? ctx->kernels.long_copy : collective_copy;
}

bhvd_status shared_barrier(bhvd_context *ctx, struct process_set *set)
{
    return shared_run(ctx, set, 1, &(struct shared_steps){0}, NULL);
}

void shared_stage(const struct reduction *reduction, struct span_cursor *cursor, unsigned char *dst, size_t nbytes)
{
    const size_t element = bhvd_dtype_size(reduction->dtype);
    const unsigned char *src;
    unsigned char *unused;
    if (reduction->prescale == 1.0) {
        span_pack(cursor, dst, nbytes);
        return;
    }
    for (size_t n; (n = span_cursor_next(cursor, nbytes, &src, &unused)); nbytes -= n, dst += n)
        reduction->scale(dst, src, reduction->prescale, n / element);
}

static size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

static const unsigned char *values_of(bhvd_context *ctx, const struct process_set *set, int index, size_t block,
                                      size_t offset, const unsigned char *own)
{
    return own && index == set->rank ? own : shared_slab(ctx, set, index, block) + offset;
}

void shared_reduce(bhvd_context *ctx, const struct process_set *set, const struct reduction *reduction, size_t block,
                   size_t offset, const unsigned char *own, unsigned char *dst, size_t nbytes)
{
    const size_t element = bhvd_dtype_size(reduction->dtype);
    _Alignas(64) unsigned char partial[SHARED_L1_BYTES];
    while (nbytes) {
        size_t n = min_size(nbytes, SHARED_L1_BYTES), count = n / element;
        // The last addition goes to dst; only then may the own values, which dst can be, be overwritten.
        const unsigned char *sum = values_of(ctx, set, 0, block, offset, own);
        if (set->size == 1)
            memmove(dst, sum, n);
        for (int i = 1; i < set->size; i++) {
            unsigned char *to = i == set->size - 1 ? dst : partial;
            reduction->reduce(to, sum, values_of(ctx, set, i, block, offset, own), count);
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
