// Alltoall over links: every member sends each other member its part. Cost: the exchanged bytes, one latency.
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

// Alltoall in shared memory. A buffer is cut into one slice per receiver; a block advances every pair of members by one
// slice, so that all write and read equally much in every block. A rank copies its part for itself straight to its destination,
// also a slice at a time.

struct alltoall {
    struct pipeline pipeline;
    const unsigned char *src;
    unsigned char *dst;
    const struct parts *parts;
    size_t slice;
    kernel_copy_fn copy;
};

static size_t piece_bytes(const struct alltoall *a, size_t part, size_t block)
{
    return size_piece(part, block * a->slice, a->slice);
}

// The slice for member `to` in the buffer of `from`.
static unsigned char *slice_of(struct executor *exec, const struct alltoall *a, int from, int to, size_t block)
{
    return shared_buffer(exec, &a->pipeline, from, block) + (size_t)(to < from ? to : to - 1) * a->slice;
}

static void copy_in(struct executor *exec, struct pipeline *pipeline, size_t block)
{
    const struct alltoall *a = (const struct alltoall *)pipeline;
    const int me = pipeline->group->rank;
    const unsigned char *part = a->src;
    const size_t *sent = a->parts->sent;
    for (int to = 0; to < pipeline->group->size; part += sent[to++]) {
        const size_t n = to == me ? 0 : piece_bytes(a, sent[to], block);
        if (n)
            shared_put(exec, slice_of(exec, a, me, to, block), part + block * a->slice, n);
    }
}

static void copy_out(struct executor *exec, struct pipeline *pipeline, size_t block)
{
    const struct alltoall *a = (const struct alltoall *)pipeline;
    const int me = pipeline->group->rank;
    const unsigned char *own = a->src;
    unsigned char *part = a->dst;
    const size_t *received = a->parts->received;
    for (int to = 0; to < me; to++)
        own += a->parts->sent[to];
    for (int from = 0; from < pipeline->group->size; part += received[from++]) {
        const size_t n = piece_bytes(a, received[from], block);
        if (n)
            a->copy(part + block * a->slice, from == me ? own + block * a->slice : slice_of(exec, a, from, me, block), n);
    }
}

bhvd_status alltoall_shared(struct executor *exec, struct group *group, const void *src, void *dst,
                            const struct parts *parts)
{
    const int n = group->size, me = group->rank;
    struct alltoall a = {.src = src, .dst = dst, .parts = parts, .slice = SHM_BUFFER_BYTES};
    size_t total = 0, sent = 0;
    if (n > 2)
        a.slice = SHM_BUFFER_BYTES / (size_t)(n - 1) / CACHE_LINE * CACHE_LINE;
    for (int i = 0; i < n; i++) {
        sent += parts->sent[i];
        total += parts->received[i];
    }
    executor_count_shared(exec, sent - parts->sent[me], total - parts->received[me]);
    if (n == 1) {
        span_copy(dst, src, parts->sent[0]);
        return BHVD_OK;
    }
    a.copy = shared_copy(exec, total);
    const size_t blocks = (parts->longest + a.slice - 1) / a.slice;
    pipeline_begin(&a.pipeline, group, 0, blocks, &(struct shared_steps){.copy_in = copy_in, .copy_out = copy_out});
    return pipeline_execute(exec, &a.pipeline);
}
