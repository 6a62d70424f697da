#include "primitive/peers.h"

#include "collective/collectives.h"

static int shift_one(int n, int i, int round)
{
    if (n % 2)
        return (round % n - i + n) % n;
    const int h = n / 2, shift = round % h;
    return i < h ? h + (shift + i) % h : (i - h - shift + h) % h;
}

static int exponential(int n, int i, int round)
{
    const int peer = i ^ 1 << round % (n > 1 ? doubling_rounds(n) : 1);
    return peer < n ? peer : i;
}

// The circle method: in a circle of n - 1 ranks, i is paired with round - i, or with the last rank instead of itself.
static int round_robin(int n, int i, int round)
{
    const int circle = n - 1 + n % 2;
    if (n < 2)
        return i;
    round %= circle;
    if (i == circle)
        return (int)((int64_t)round * (circle + 1) / 2 % circle);
    const int peer = (round - i + circle) % circle;
    return peer == i && circle < n ? circle : peer;
}

struct peers peers_of(bhvd_topology topology, int n, int i, int round)
{
    if (topology != BHVD_TOPOLOGY_RING) {
        const int peer = topology == BHVD_TOPOLOGY_EXPONENTIAL   ? exponential(n, i, round)
                         : topology == BHVD_TOPOLOGY_ROUND_ROBIN ? round_robin(n, i, round)
                                                                 : shift_one(n, i, round);
        return (struct peers){.count = peer != i, .index = {peer}, .times = 1};
    }
    // In a ring of two the neighbor is on both sides, and counts twice.
    return (struct peers){.count = n > 2 ? 2 : n - 1, .index = {(i + n - 1) % n, (i + 1) % n}, .times = n == 2 ? 2 : 1};
}

struct shares peers_shares(bhvd_topology topology, const struct peers *peers, int own, const int *sizes)
{
    if (topology != BHVD_TOPOLOGY_RING)
        return (struct shares){.own = own, .peer = {sizes[0]}, .of = own + sizes[0]};
    struct shares shares = {.own = 3 * own, .of = 3 * own};
    for (int p = 0; p < peers->count; p++) {
        shares.peer[p] = peers->times * (sizes[p] < own ? sizes[p] : own);
        shares.own -= shares.peer[p];
    }
    return shares;
}
