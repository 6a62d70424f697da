// Broadcast in shared memory: the root stages a block, the others copy it while the root stages the next one.
#include "collective/shared.h"

bhvd_status broadcast_shared(bhvd_context *ctx, struct process_set *set, int root, const void *src, void *dst,
                             size_t nbytes)
{
    const bool is_root = set->rank == root;
    bhvd_status status = BHVD_OK;
    for (size_t offset = 0; offset < nbytes && !status && set->size > 1; offset += HOST_SLAB_BYTES) {
        size_t n = nbytes - offset < HOST_SLAB_BYTES ? nbytes - offset : HOST_SLAB_BYTES;
        if (is_root)
            collective_copy(shared_slab(ctx, set, root), (const char *)src + offset, n);
        status = shared_barrier(ctx, set);
        if (!is_root && !status)
            collective_copy((char *)dst + offset, shared_slab(ctx, set, root), n);
        shared_next_block(set);
    }
    if (is_root && dst != src)
        collective_copy(dst, src, nbytes);
    if (is_root)
        ctx->counters.payload_bytes_sent += nbytes * (size_t)(set->size - 1);
    else
        ctx->counters.payload_bytes_received += nbytes;
    return status;
}
