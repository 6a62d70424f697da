// Allgather in shared memory: everyone stages the next piece of its part and copies the others' pieces to their places.
#include "collective/shared.h"

// Copies to the vector's destinations, from `place` on.
static void put(const struct span_list *dst, size_t place, const unsigned char *from, size_t nbytes)
{
    const unsigned char *unused;
    unsigned char *to;
    struct span_cursor cursor = span_cursor_at(dst, place);
    for (size_t n; (n = span_cursor_next(&cursor, nbytes, &unused, &to)); nbytes -= n, from += n) {
        if (to != from)
            memcpy(to, from, n);
    }
}

bhvd_status allgather_shared(bhvd_context *ctx, struct process_set *set, const void *src, const struct span_list *dst,
                             const size_t *part)
{
    const unsigned char *mine = src;
    size_t longest = 0, total = 0, my_place = 0;
    for (int i = 0; i < set->size; i++) {
        longest = part[i] > longest ? part[i] : longest;
        my_place += i < set->rank ? part[i] : 0;
        total += part[i];
    }
    put(dst, my_place, mine, part[set->rank]);
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
            put(dst, place, shared_slab(ctx, set, i), n);
        }
        shared_next_block(set);
    }
    ctx->counters.payload_bytes_sent += part[set->rank] * (size_t)(set->size - 1);
    ctx->counters.payload_bytes_received += total - part[set->rank];
    return status;
}
