// Allgather in shared memory: everyone stages the next piece of its part and copies the others' pieces to their places.
#include "collective/shared.h"

bhvd_status allgather_shared(bhvd_context *ctx, struct process_set *set, const void *src, void *dst, const size_t *part)
{
    const unsigned char *mine = src;
    unsigned char *out = dst;
    size_t longest = 0, total = 0, my_offset = 0;
    for (int i = 0; i < set->size; i++) {
        longest = part[i] > longest ? part[i] : longest;
        my_offset += i < set->rank ? part[i] : 0;
        total += part[i];
    }
    collective_copy(out + my_offset, mine, part[set->rank]);
    bhvd_status status = BHVD_OK;
    for (size_t offset = 0; offset < longest && !status && set->size > 1; offset += HOST_SLAB_BYTES) {
        for (int k = 0; k < set->size && !status; k++) {
            // k = 0: stage my own piece; then, behind the barrier, the others', each rank beginning with another one.
            int i = (set->rank + k) % set->size;
            size_t n = part[i] <= offset ? 0 : part[i] - offset < HOST_SLAB_BYTES ? part[i] - offset : HOST_SLAB_BYTES;
            if (k == 0) {
                collective_copy(shared_slab(ctx, set, i), mine + offset, n);
                status = shared_barrier(ctx, set);
                continue;
            }
            size_t place = offset;
            for (int j = 0; j < i; j++)
                place += part[j];
            collective_copy(out + place, shared_slab(ctx, set, i), n);
        }
        shared_next_block(set);
    }
    ctx->counters.payload_bytes_sent += part[set->rank] * (size_t)(set->size - 1);
    ctx->counters.payload_bytes_received += total - part[set->rank];
    return status;
}
