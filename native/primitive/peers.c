#include "primitive/peers.h"

static int shift_one(int n, int i, int round)
{
    if (n % 2)
        return (round % n - i + n) % n;
    const int h = n / 2, shift = round % h;
    return i < h ? h + (shift + i) % h : (i - h - shift + h) % h;
}

struct peers peers_of(bhvd_topology topology, int n, int i, int round)
{
    if (topology == BHVD_TOPOLOGY_SHIFT_ONE) {
        const int peer = shift_one(n, i, round);
        return (struct peers){.count = peer != i, .index = {peer}, .times = 1};
    }
    // In a ring of two the neighbour stands on both sides, and counts twice.
    return (struct peers){.count = n > 2 ? 2 : n - 1, .index = {(i + n - 1) % n, (i + 1) % n}, .times = n == 2 ? 2 : 1};
}

struct shares peers_shares(bhvd_topology topology, const struct peers *peers, int own, const int *sizes)
{
    if (topology == BHVD_TOPOLOGY_SHIFT_ONE)
        return (struct shares){.own = own, .peer = {sizes[0]}, .of = own + sizes[0]};
    struct shares shares = {.own = 3 * own, .of = 3 * own};
    for (int p = 0; p < peers->count; p++) {
        shares.peer[p] = peers->times * (sizes[p] < own ? sizes[p] : own);
        shares.own -= shares.peer[p];
    }
    return shares;
}
