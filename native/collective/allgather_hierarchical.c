// Allgather in two levels (hierarchy.h). A part crosses to every other host once: member j sends it to the host's member
// j modulo the number of members there. Each host then spreads what its members received in shared memory, its own parts
// first, while the wire is busy with the others'. Hosts may hold different numbers of members.
// Wire: (h-1) parts out of every member, instead of one for each member elsewhere.
#include <stdlib.h>

#include "collective/collective.h"
#include "run/hierarchy.h"
#include "run/shared.h"

struct gathering {
    struct run *run;
    struct group *group;
    const struct hierarchy *h;
    const size_t *part;
    unsigned char *dst;
    size_t *place;                      // by position: where its part begins in dst
    struct transfer *transfers;
    size_t *local_part;                 // by local member: what it spreads in one round
    struct span *local_place;
};

// Host by host, its own part goes out, and those of the members come in whose index is this one's modulo the number of members
// here.
static void post_across(struct gathering *g, const void *src)
{
    const struct hierarchy *h = g->h;
    struct transfer *next = g->transfers;
    for (int step = 1; step < h->hosts; step++) {
        int to = (h->host + step) % h->hosts, from = (h->host + h->hosts - step) % h->hosts;
        int peer = hierarchy_member(h, to, h->index % hierarchy_members_of(h, to));
        group_send(g->run, g->group, peer, next++, src, g->part[g->group->rank]);
        for (int j = h->index; j < hierarchy_members_of(h, from); j += h->local->size) {
            int other = hierarchy_member(h, from, j);
            group_receive(g->run, g->group, other, next++, g->dst + g->place[other], g->part[other]);
        }
    }
}

// Spreads the parts of one host's members first to first + (local members) - 1, of which each local member holds one.
static bhvd_status spread(struct gathering *g, int host, int first)
{
    const struct hierarchy *h = g->h;
    const int members = hierarchy_members_of(h, h->host);
    struct span_list places = {g->local_place, (size_t)members, (size_t)members, 0};
    unsigned char *mine = g->dst;
    for (int i = 0; i < members; i++) {
        bool exists = first + i < hierarchy_members_of(h, host);
        int other = exists ? hierarchy_member(h, host, first + i) : 0;
        g->local_part[i] = exists ? g->part[other] : 0;
        g->local_place[i] = (struct span){NULL, exists ? g->dst + g->place[other] : NULL, g->local_part[i]};
        places.nbytes += g->local_part[i];
        if (i == h->index && exists)
            mine = g->dst + g->place[other];
    }
    return allgather_shared(g->run, h->local, mine, &places, g->local_part);
}

static bhvd_status gather(struct gathering *g, const void *src)
{
    const struct hierarchy *h = g->h;
    const int members = hierarchy_members_of(h, h->host);
    span_copy(g->dst + g->place[g->group->rank], src, g->part[g->group->rank]);
    post_across(g, src);
    bhvd_status status = spread(g, h->host, 0);
    int arrived = 0;
    for (int step = 1; step < h->hosts && !status; step++) {
        int host = (h->host + h->hosts - step) % h->hosts, count = 1;       // as posted: one send, these receives
        for (int j = h->index; j < hierarchy_members_of(h, host); j += members)
            count++;
        status = run_transfers(g->run, g->transfers + arrived, count);
        arrived += count;
        for (int first = 0; first < hierarchy_members_of(h, host) && !status; first += members)
            status = spread(g, host, first);
    }
    return status;
}

bhvd_status allgather_hierarchical(struct run *run, struct group *group, const void *src, void *dst,
                                   const size_t *part)
{
    const struct hierarchy *h = group->hierarchy;
    struct gathering g = {.run = run, .group = group, .h = h, .part = part, .dst = dst};
    g.place = malloc((size_t)group->size * sizeof *g.place);
    g.transfers = malloc(2 * (size_t)group->size * sizeof *g.transfers);
    g.local_part = malloc((size_t)h->local->size * sizeof *g.local_part);
    g.local_place = malloc((size_t)h->local->size * sizeof *g.local_place);
    bhvd_status status;
    if (!g.place || !g.transfers || !g.local_part || !g.local_place) {
        status = run_fail(run, BHVD_ERR_SYSTEM, "no memory for a collective of %d ranks", group->size);
    } else {
        size_t total = 0;
        for (int i = 0; i < group->size; total += part[i++])
            g.place[i] = total;
        status = gather(&g, src);
    }
    free(g.place);
    free(g.transfers);
    free(g.local_part);
    free(g.local_place);
    return status;
}
