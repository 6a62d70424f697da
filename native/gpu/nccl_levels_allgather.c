// Allgather in two levels: own part to the host | to one member of every other host | what came, to the GPU | each member
// spreads what it has within its host. Which member spreads a part is said in allgather_hierarchical.c; hosts may hold different
// numbers of members.
// Wire: (h-1) parts out of every member. From its host a GPU has the parts that it spreads, but for its own.
#include <stdlib.h>

#include "gpu/nccl_levels.h"

// The next part of another host that this member spreads, after that of member *index of *host; false: there is none.
// To begin with: host -1.
static bool next_received(const struct hierarchy *h, int *host, int *index)
{
    *index += h->local->size;
    while (*host < 0 || *host == h->host || *index >= hierarchy_members_of(h, *host)) {
        if (++*host == h->hosts)
            return false;
        *index = h->index;
    }
    return true;
}

// Between the hosts. held: room for where each part lies in pinned memory.
static bhvd_status gather_across(struct nccl_run *x, const void *src, unsigned char *dst, const size_t *part,
                                 const size_t *place, size_t *held, struct transfer *transfers)
{
    const struct hierarchy *h = x->levels;
    const size_t mine = part[x->whole->rank];
    struct device_buffer *own, *others;
    size_t nbytes = 0;
    for (int host = -1, index = 0; next_received(h, &host, &index);) {
        const int position = hierarchy_member(h, host, index);
        held[position] = nbytes;
        nbytes += part[position];
    }
    bhvd_status status = nccl_run_scratch(x, MEMORY_PINNED, mine, &own);
    if (!status)
        status = nccl_run_scratch(x, MEMORY_PINNED, nbytes, &others);
    if (!status)
        status = nccl_levels_to_host(x, own, src, mine);
    if (!status)
        status = nccl_levels_wait_for(x, own);
    if (!status)
        status = run_transfers(x->run, transfers, allgather_post_across(x->run, x->whole, own->data, others->data, held,
                                                                        part, transfers));
    for (int host = -1, index = 0; !status && next_received(h, &host, &index);) {
        const int position = hierarchy_member(h, host, index);
        status = nccl_run_copy(x, dst + place[position], others->data + held[position], part[position]);
    }
    return status;
}

static bhvd_status spread(struct nccl_run *x, const void *src, unsigned char *dst, const size_t *part, const size_t *place)
{
    const struct hierarchy *h = x->levels;
    nccl_result inside = x->nccl->group_start();
    for (int host = 0; host < h->hosts; host++) {
        for (int i = 0; i < hierarchy_members_of(h, host); i++) {
            const int position = hierarchy_member(h, host, i);
            unsigned char *at = dst + place[position];
            if (part[position])
                nccl_run_keep(&inside, x->nccl->broadcast(position == x->whole->rank ? src : at, at, part[position], NCCL_UINT8,
                                                          i % x->set->size, x->group->comm, x->stream));
        }
    }
    return nccl_run_group_end(x, inside);
}

bhvd_status nccl_levels_allgather(struct nccl_run *x, const void *src, unsigned char *dst, const size_t *part)
{
    const size_t members = (size_t)x->whole->size;
    size_t *place = malloc(2 * members * sizeof *place), total = 0;
    struct transfer *transfers = malloc(2 * members * sizeof *transfers);
    bhvd_status status;
    if (!place || !transfers) {
        status = run_fail(x->run, BHVD_ERR_SYSTEM, "no memory for a collective of %zu ranks", members);
    } else {
        for (size_t i = 0; i < members; total += part[i++])
            place[i] = total;
        status = gather_across(x, src, dst, part, place, place + members, transfers);
        if (!status)
            status = spread(x, src, dst, part, place);
    }
    free(place);
    free(transfers);
    return status;
}
