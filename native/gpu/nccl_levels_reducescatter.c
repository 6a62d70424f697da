// Reducescatter in two levels: parts packed | reduce-scatter within the host | shard to the host | reducescatter among its
// owners | back.
//
// A part goes by way of the shard whose owner is to have it. On hosts with more members than there are shards, member i has its
// part from the owner of shard i modulo their number, by NCCL. In every piece of the vector each part has a slice:
//
//     3 and 2 members, 2 shards:   shard 0   A0 A2 B0     shard 1   A1 B1
//
// Wire: N (h-1)/h elements each way per host of h. To its host a GPU has 1/shards of N, and back what it sent on or keeps.
#include <stdlib.h>

#include "gpu/nccl_levels.h"

struct scatter {
    const struct hierarchy *h;
    bhvd_op op;
    struct reduction across;            // prescaled on the GPU
    const unsigned char *src;
    unsigned char *dst;
    const size_t *part;
    size_t *place;                      // by position: where a part begins in src
    size_t *cross_part;                 // by host: what its owner of this member's shard has to get of a piece
    size_t slice, longest;              // bytes of a part in a piece, but for the last; of the longest part
    size_t through;                     // as many parts go through a shard at most
    struct device_span *table;          // of all pieces, since only owners know when one has been read
    unsigned char *shards;              // on the device: a piece
};

static size_t shorter(size_t a, size_t b) { return a < b ? a : b; }

static size_t slice_of(const struct scatter *s, int position, size_t number)
{
    const size_t begin = number * s->slice, part = s->part[position];
    return begin < part ? shorter(part - begin, s->slice) : 0;
}

// Room for each shard of a piece.
static size_t shard_of(const struct scatter *s, size_t number)
{
    return nccl_levels_aligned(shorter(s->longest - number * s->slice, s->slice) * s->through);
}

// Fills in cross_part; returns the sum.
static size_t cut_shard(struct scatter *s, size_t number)
{
    const struct hierarchy *h = s->h;
    size_t total = 0;
    for (int host = 0; host < h->hosts; total += s->cross_part[host++]) {
        s->cross_part[host] = 0;
        for (int i = h->index; i < hierarchy_members_of(h, host); i += h->shards)
            s->cross_part[host] += slice_of(s, hierarchy_member(h, host, i), number);
    }
    return total;
}

// The slices of all parts, shard by shard.
static bhvd_status pack(struct nccl_run *x, const struct scatter *s, size_t number, size_t shard)
{
    const struct hierarchy *h = s->h;
    struct device_span *table = s->table + number * (size_t)x->whole->size;
    size_t spans = 0;
    for (int owner = 0; owner < h->shards; owner++) {
        unsigned char *to = s->shards + shard * (size_t)owner;
        for (int host = 0; host < h->hosts; host++) {
            for (int i = owner; i < hierarchy_members_of(h, host); i += h->shards) {
                const int position = hierarchy_member(h, host, i);
                const size_t nbytes = slice_of(s, position, number);
                if (nbytes)
                    table[spans++] = (struct device_span){s->src + s->place[position] + number * s->slice, to, nbytes, 0};
                to += nbytes;
            }
        }
    }
    return nccl_run_checked(x, device_copy_spans(x->device, table, spans, x->stream));
}

static bhvd_status begin_piece(struct nccl_run *x, void *arg, size_t number, struct device_buffer *pinned)
{
    struct scatter *s = arg;
    const size_t shard = shard_of(s, number);
    bhvd_status status = pack(x, s, number, shard);
    if (!status)
        status = nccl_levels_reduce(x, s->op, s->across.dtype, s->shards, shard);
    return status || !pinned ? status : nccl_levels_to_host(x, pinned, s->shards + shard * (size_t)s->h->index,
                                                            cut_shard(s, number));
}

static bhvd_status exchange_shard(struct nccl_run *x, void *arg, size_t number, unsigned char *data)
{
    struct scatter *s = arg;
    cut_shard(s, number);
    return reducescatter_links(x->run, s->h->cross, &s->across, data, data, s->cross_part);
}

// The owner keeps its own slice; what is for members without a shard goes to them from the memory of the piece, which has been
// read by then.
static bhvd_status end_piece(struct nccl_run *x, void *arg, size_t number, struct device_buffer *pinned)
{
    struct scatter *s = arg;
    const struct hierarchy *h = s->h;
    const size_t mine = slice_of(s, x->whole->rank, number);
    unsigned char *to = s->dst + number * s->slice, *at = s->shards;
    bhvd_status status = BHVD_OK;
    if (pinned) {
        cut_shard(s, number);
        status = nccl_run_copy(x, to, pinned->data, mine);
        if (!status)
            status = nccl_run_copy(x, at, pinned->data + mine, s->cross_part[h->host] - mine);
    }
    if (status || x->set->size == h->shards)
        return status;
    nccl_result inside = x->nccl->group_start();
    for (int i = h->index + h->shards; pinned && i < x->set->size; i += h->shards) {
        const size_t nbytes = slice_of(s, hierarchy_member(h, h->host, i), number);
        if (nbytes)
            nccl_run_keep(&inside, x->nccl->send(at, nbytes, NCCL_UINT8, i, x->group->comm, x->stream));
        at += nbytes;
    }
    if (!pinned && mine)
        nccl_run_keep(&inside, x->nccl->recv(to, mine, NCCL_UINT8, h->index % h->shards, x->group->comm, x->stream));
    return nccl_run_group_end(x, inside);
}

// What a piece has, and memory for it.
static bhvd_status prepare(struct nccl_run *x, struct scatter *s, struct levels_pieces *pieces)
{
    const struct hierarchy *h = s->h;
    const int members = x->whole->size;
    struct device_buffer *device, *tables;
    size_t total = 0;
    for (int i = 0; i < members; total += s->part[i++]) {
        s->place[i] = total;
        s->longest = s->part[i] > s->longest ? s->part[i] : s->longest;
    }
    for (int host = 0; host < h->hosts; host++)         // most through the first shard
        s->through += (size_t)((hierarchy_members_of(h, host) + h->shards - 1) / h->shards);
    s->slice = LEVELS_SHARD_MAX_BYTES / s->through / LEVELS_ALIGNMENT * LEVELS_ALIGNMENT;
    s->slice = s->slice ? s->slice : LEVELS_ALIGNMENT;
    pieces->count = (s->longest + s->slice - 1) / s->slice;
    pieces->shard_nbytes = shard_of(s, 0);
    bhvd_status status = nccl_run_scratch(x, MEMORY_DEVICE, pieces->shard_nbytes * (size_t)h->shards, &device);
    if (!status)
        status = nccl_run_scratch(x, MEMORY_PINNED, pieces->count * (size_t)members * sizeof *s->table, &tables);
    if (status)
        return status;
    s->shards = device->data;
    s->table = (struct device_span *)(void *)tables->data;
    return BHVD_OK;
}

bhvd_status nccl_levels_reducescatter(struct nccl_run *x, bhvd_op op, const struct reduction *reduction,
                                      const unsigned char *src, unsigned char *dst, const size_t *part)
{
    const struct hierarchy *h = x->levels;
    const int members = x->whole->size;
    struct scatter s = {.h = h, .op = op, .across = *reduction, .src = src, .dst = dst, .part = part};
    struct levels_pieces pieces = {.arg = &s, .begin = begin_piece, .exchange = exchange_shard, .end = end_piece};
    s.across.prescale = 1.0;
    s.place = malloc((size_t)(members + h->hosts) * sizeof *s.place);
    if (!s.place)
        return run_fail(x->run, BHVD_ERR_SYSTEM, "no memory for a collective of %d ranks", members);
    s.cross_part = s.place + members;
    bhvd_status status = prepare(x, &s, &pieces);
    if (!status)
        status = nccl_levels_run_pieces(x, &pieces);
    free(s.place);
    return status;
}
