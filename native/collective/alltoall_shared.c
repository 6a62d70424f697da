// Alltoall in shared memory: everyone stages the next block of what it sends, and takes from each slab the part that is
// meant for it.
#include "collective/shared.h"

struct interval {
    size_t begin, end;
};

// The bytes from `from` to `to`, as they lie in what `from` sends.
static struct interval sent_part(const size_t *bytes, int size, int from, int to)
{
    struct interval part = {0, 0};
    for (int i = 0; i < to; i++)
        part.begin += bytes[from * size + i];
    part.end = part.begin + bytes[from * size + to];
    return part;
}

bhvd_status alltoall_shared(bhvd_context *ctx, struct process_set *set, const void *src, void *dst, const size_t *bytes)
{
    const int n = set->size, me = set->rank;
    const size_t my_total = sent_part(bytes, n, me, n - 1).end;
    size_t longest = 0;
    for (int i = 0; i < n; i++) {
        size_t total = sent_part(bytes, n, i, n - 1).end;
        longest = total > longest ? total : longest;
    }
    bhvd_status status = BHVD_OK;
    for (size_t offset = 0; offset < longest && !status; offset += HOST_SLAB_BYTES) {
        size_t end = offset + HOST_SLAB_BYTES;
        if (my_total > offset)
            collective_copy(shared_slab(ctx, set, me), (const char *)src + offset, (my_total < end ? my_total : end) - offset);
        status = shared_barrier(ctx, set);
        size_t place = 0;
        for (int i = 0; i < n && !status; place += bytes[i++ * n + me]) {
            struct interval part = sent_part(bytes, n, i, me);
            size_t from = part.begin > offset ? part.begin : offset, to = part.end < end ? part.end : end;
            if (from < to)
                collective_copy((char *)dst + place + (from - part.begin), shared_slab(ctx, set, i) + (from - offset), to - from);
        }
        shared_next_block(set);
    }
    ctx->counters.payload_bytes_sent += my_total - bytes[me * n + me];
    for (int i = 0; i < n; i++)
        ctx->counters.payload_bytes_received += i == me ? 0 : bytes[i * n + me];
    return status;
}
