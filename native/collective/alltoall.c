// Alltoall over links: every member sends each other member its part. Cost: the exchanged bytes, one latency. In shared memory also
// allgather and broadcast, which send the same to all.
#include "collective/collectives.h"

void schedule_alltoall(struct schedule *schedule, const size_t *sent, const size_t *received)
{
    const int n = schedule->size, me = schedule->rank;
    size_t from = 0, own_from = 0, to = 0;
    for (int i = 0; i < n; from += sent[i++]) {
        if (i == me)
            own_from = from;
        else
            for_each_segment(cut, (struct byte_range){from, sent[i]})
                schedule_send(schedule, i, in_buffer(INPUT_BUFFER, cut.begin), cut.nbytes, STEP_NONE);
    }
    for (int i = 0; i < n; to += received[i++]) {
        if (i == me)
            schedule_copy(schedule, in_buffer(OUTPUT_BUFFER, to), in_buffer(INPUT_BUFFER, own_from), sent[me], STEP_NONE);
        else
            for_each_segment(cut, (struct byte_range){to, received[i]})
                schedule_receive(schedule, i, in_buffer(OUTPUT_BUFFER, cut.begin), cut.nbytes, STEP_NONE);
    }
}

// ---------------------------------------------------------------------------------------------------- in shared memory

// Each member copies in the next piece of what it sends, and copies out the others' to their offsets. Alltoall: a buffer is cut
// into one slice per receiver, so that all write and read equally much in every block.

// Bytes of the part from this member: in a broadcast only the root has one.
static size_t part_from(const struct exchange_pipeline *x, int from)
{
    return x->received ? x->received[from] : from == x->pipeline.steps.root ? x->whole.nbytes : 0;
}

// Where the part from this member goes.
static size_t offset_of(const struct exchange_pipeline *x, int from)
{
    size_t offset = 0;
    for (int i = 0; i < from; i++)
        offset += part_from(x, i);
    return offset;
}

// What member `from` sends to member `to` in a block.
static unsigned char *slice_of(struct executor *exec, const struct exchange_pipeline *x, int from, int to, size_t block)
{
    return shared_buffer(exec, &x->pipeline, from, block) + (x->sent ? (size_t)(to < from ? to : to - 1) * x->piece : 0);
}

// Copies to the vector's destinations, from offset `offset` on.
static void put(const struct exchange_pipeline *x, size_t offset, const unsigned char *from, size_t nbytes)
{
    struct span_cursor cursor = span_cursor_at(x->dst, offset);
    for (struct span s; (s = span_cursor_next(&cursor, nbytes)).nbytes; nbytes -= s.nbytes, from += s.nbytes) {
        if (s.dst != from)
            x->copy(s.dst, from, s.nbytes);
    }
}

static void copy_in(struct executor *exec, struct pipeline *pipeline, size_t block)
{
    const struct exchange_pipeline *x = (const struct exchange_pipeline *)pipeline;
    const int me = pipeline->group->rank;
    const size_t at = block * x->piece;
    const unsigned char *part = x->src;
    if (!x->sent)
        shared_put(exec, slice_of(exec, x, me, me, block), part + at, size_piece(part_from(x, me), at, x->piece));
    for (int to = 0; x->sent && to < pipeline->group->size; part += x->sent[to++]) {
        const size_t n = to == me ? 0 : size_piece(x->sent[to], at, x->piece);
        if (n)
            shared_put(exec, slice_of(exec, x, me, to, block), part + at, n);
    }
}

static void copy_out(struct executor *exec, struct pipeline *pipeline, size_t block)
{
    const struct exchange_pipeline *x = (const struct exchange_pipeline *)pipeline;
    const int me = pipeline->group->rank, size = pipeline->group->size;
    const size_t at = block * x->piece;
    size_t offset = offset_of(x, me) + part_from(x, me);
    for (int k = 1; k < size; k++) {
        const int from = (me + k) % size;           // each rank begins with a different member
        const size_t part = part_from(x, from), n = size_piece(part, at, x->piece);
        offset = from == 0 ? 0 : offset;
        if (n)
            put(x, offset + at, slice_of(exec, x, from, me, block), n);
        offset += part;
    }
}

static void exchange_to(struct exchange_pipeline *x, void *dst, size_t nbytes)
{
    x->whole = (struct span){NULL, dst, nbytes};
    x->list = (struct span_list){&x->whole, 1, 1, nbytes};
    x->dst = &x->list;
}

// The other members of x are set. longest: the longest part. root: of a broadcast; -1: none.
static void begin(struct exchange_pipeline *x, struct executor *exec, struct group *group, int slot, size_t longest, int root)
{
    const struct shared_steps steps = {copy_in, NULL, copy_out, root >= 0, root};
    x->pipeline.steps = steps;
    const size_t total = offset_of(x, group->size), own = part_from(x, group->rank);
    size_t sent = 0;
    for (int to = 0; to < group->size; to++)
        sent += to == group->rank ? 0 : x->sent ? x->sent[to] : own;
    x->copy = shared_copy(exec, total);
    executor_count_shared(exec, sent, total - own);
    pipeline_begin(&x->pipeline, group, slot, group->size > 1 ? (longest + x->piece - 1) / x->piece : 0, &steps);
}

void allgather_begin(struct exchange_pipeline *x, struct executor *exec, struct group *group, int slot, const void *src,
                     const struct span_list *dst, const size_t *part)
{
    size_t longest = 0;
    for (int i = 0; i < group->size; i++)
        longest = part[i] > longest ? part[i] : longest;
    *x = (struct exchange_pipeline){.src = src, .dst = dst, .received = part, .piece = SHM_BUFFER_BYTES};
    begin(x, exec, group, slot, longest, -1);
    put(x, offset_of(x, group->rank), src, part[group->rank]);
}

bhvd_status allgather_shared(struct executor *exec, struct group *group, const void *src, const struct span_list *dst,
                             const size_t *part)
{
    struct exchange_pipeline x;
    allgather_begin(&x, exec, group, 0, src, dst, part);
    return pipeline_execute(exec, &x.pipeline);
}

bhvd_status alltoall_shared(struct executor *exec, struct group *group, const void *src, void *dst, const struct parts *parts)
{
    const int n = group->size, me = group->rank;
    const unsigned char *own = src;
    struct exchange_pipeline x = {.src = src, .sent = parts->sent, .received = parts->received, .piece = SHM_BUFFER_BYTES};
    if (n > 2)
        x.piece = SHM_BUFFER_BYTES / (size_t)(n - 1) / CACHE_LINE * CACHE_LINE;
    exchange_to(&x, dst, offset_of(&x, n));
    begin(&x, exec, group, 0, parts->longest, -1);
    for (int to = 0; to < me; to++)
        own += parts->sent[to];
    put(&x, offset_of(&x, me), own, parts->sent[me]);
    return pipeline_execute(exec, &x.pipeline);
}

void broadcast_begin(struct exchange_pipeline *x, struct executor *exec, struct group *group, int slot, int root, const void *src,
                     void *dst, size_t nbytes)
{
    *x = (struct exchange_pipeline){.src = src, .piece = SHM_BUFFER_BYTES};
    exchange_to(x, dst, nbytes);
    begin(x, exec, group, slot, nbytes, root);
}

bhvd_status broadcast_shared(struct executor *exec, struct group *group, int root, const void *src, void *dst,
                             size_t nbytes)
{
    struct exchange_pipeline x;
    broadcast_begin(&x, exec, group, 0, root, src, dst, nbytes);
    bhvd_status status = pipeline_execute(exec, &x.pipeline);
    if (group->rank == root && dst != src)
        span_copy(dst, src, nbytes);
    return status;
}
