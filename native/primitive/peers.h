// The peers of the decentralized primitives: pure functions of the topology, the number of participants n, the own position and the
// round, so that all ranks compute the same pairing without communication.
//
//     SHIFT_ONE, n even   h = n/2; the lower half is paired with the upper one, shifted by one more position in every round:
//                         p(i) = h + (round + i) mod h  for i < h,    p(i) = (i - h - round) mod h  else
//                         period h: every one of the h^2 pairs across the halves occurs once
//     SHIFT_ONE, n odd    round robin by the circle method: p(i) = (round - i) mod n; a rank with p(i) = i pauses
//                         period n: every one of the n(n-1)/2 pairs occurs once, every rank pauses once
//     EXPONENTIAL         p(i) = i xor 2^(round mod L), L = ceil(log2 n); a rank with p(i) >= n pauses
//                         period L; n a power of two: after L rounds all have the mean of all
//     ROUND_ROBIN         the circle method, for every n
//                         period n-1 (n odd: n): every one of the n(n-1)/2 pairs occurs once
//     RING                i-1 and i+1, in every round; n = 2: they are the same rank, n = 1: there are none
//
// A participant may represent several ranks: a host, with the mean of its ranks. A host is then weighted by its number of ranks, so
// that an average keeps the mean over all ranks, even if hosts differ in size (peers_shares). With s_i ranks of participant i:
//
//     pairs       (s_i x_i + s_p x_p) / (s_i + s_p)
//     RING        x_i + sum_p 1/3 min(1, s_p / s_i) (x_p - x_i)       s_i W_ip = s_p W_pi (Metropolis), W_ii >= 1/3
//
// p(p(i)) = i always: both sides of a pair name each other. Source of the even pairing: Gan et al., BAGUA,
// arXiv:2107.01499, whose decentralized algorithm does not take odd n. Of EXPONENTIAL: Ying et al., arXiv:2110.13363, whose
// one-peer graph is directed (i sends to i + 2^k); pairs keep the mean without weights.
#pragma once

#include "bagua_hvd.h"

enum { PEERS_MAX = 2 };

// Positions among the participants. RING: left (i-1), then right (i+1).
struct peers {
    int count;                  // different peers; 0: this rank pauses, or is alone
    int index[PEERS_MAX];
    int times;                  // weight of each peer's value: the mean is over 1 + times * count values
};

struct peers peers_of(bhvd_topology topology, int n, int i, int round);

// The average is (own x_i + sum_p peer[p] x_p) / of, with integer weights. For equal participants, own and all of peer[] are equal.
struct shares {
    int own, peer[PEERS_MAX], of;
};

// own, sizes: number of ranks of this participant, and of each peer.
struct shares peers_shares(bhvd_topology topology, const struct peers *peers, int own, const int *sizes);
