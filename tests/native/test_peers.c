// The peer schedule of the decentralized primitives: involution, coverage and period, and BAGUA's published numbers.
#include "check.h"
#include "primitive/peers.h"

enum { SIZES = 17 };

static int peer_of(int n, int i, int round)
{
    struct peers peers = peers_of(BHVD_TOPOLOGY_SHIFT_ONE, n, i, round);
    CHECK(peers.count <= 1);
    CHECK_EQ(peers.times, 1);
    CHECK(peers.count == 1 || peers.index[0] == i);
    CHECK(peers.index[0] >= 0 && peers.index[0] < n);
    return peers.index[0];
}

TEST(shift_one_is_an_involution_in_every_round)
{
    for (int n = 1; n < SIZES; n++) {
        for (int round = 0; round < 4 * n; round++) {
            for (int i = 0; i < n; i++)
                CHECK_EQ(peer_of(n, peer_of(n, i, round), round), i);
        }
        for (int i = 0; i < n; i++)
            CHECK_EQ(peer_of(n, peer_of(n, i, INT32_MAX), INT32_MAX), i);
    }
}

TEST(even_halves_meet_across_once_in_a_period)
{
    for (int n = 2; n < SIZES; n += 2) {
        int met[SIZES][SIZES] = {{0}};
        for (int round = 0; round < n / 2; round++) {
            for (int i = 0; i < n; i++) {
                met[i][peer_of(n, i, round)]++;
                CHECK_EQ(peer_of(n, i, round), peer_of(n, i, round + n / 2));
            }
        }
        for (int i = 0; i < n; i++) {
            for (int j = 0; j < n; j++)
                CHECK_EQ(met[i][j], (i < n / 2) != (j < n / 2));
        }
    }
}

static int paired(bhvd_topology topology, int n, int i, int round)
{
    const struct peers peers = peers_of(topology, n, i, round);
    CHECK(peers.count == (peers.index[0] != i));
    CHECK(peers.index[0] >= 0 && peers.index[0] < n);
    return peers.index[0];
}

TEST(other_pairs_are_involutions_too)
{
    for (bhvd_topology topology = BHVD_TOPOLOGY_EXPONENTIAL; topology <= BHVD_TOPOLOGY_ROUND_ROBIN; topology++)
        for (int n = 1; n < 70; n++)
            for (int round = 0; round < 2 * n; round++)
                for (int i = 0; i < n; i++) {
                    CHECK_EQ(paired(topology, n, paired(topology, n, i, round), round), i);
                    CHECK_EQ(paired(topology, n, paired(topology, n, i, INT32_MAX - round), INT32_MAX - round), i);
                }
}

// Each rank's share of every value, in units of 1 / n.
TEST(exponential_of_a_power_of_two_is_the_mean)
{
    for (int rounds = 0; rounds < 6; rounds++) {
        const int n = 1 << rounds;
        double has[32][32] = {{0}}, before[32][32];
        for (int i = 0; i < n; i++)
            has[i][i] = n;
        for (int round = 0; round < rounds; round++) {
            memcpy(before, has, sizeof has);
            for (int i = 0; i < n; i++)
                for (int j = 0; j < n; j++)
                    has[i][j] = (before[i][j] + before[paired(BHVD_TOPOLOGY_EXPONENTIAL, n, i, round)][j]) / 2;
        }
        for (int i = 0; i < n; i++)
            for (int j = 0; j < n; j++)
                CHECK(has[i][j] == 1);
    }
}

TEST(in_a_round_robin_each_meets_each_once)
{
    for (int n = 2; n < SIZES; n++) {
        int met[SIZES][SIZES] = {{0}};
        for (int round = 0; round < n - 1 + n % 2; round++)
            for (int i = 0; i < n; i++)
                met[i][paired(BHVD_TOPOLOGY_ROUND_ROBIN, n, i, round)]++;
        for (int i = 0; i < n; i++)
            for (int j = 0; j < n; j++)
                CHECK_EQ(met[i][j], i == j ? n % 2 : 1);
    }
}

// The weight of p for i equals that of i for p, scaled by their ranks, so an average keeps the mean over all ranks.
TEST(shares_are_symmetric_and_leave_something)
{
    for (int own = 1; own < 9; own++) {
        for (int other = 1; other < 9; other++) {
            for (bhvd_topology topology = BHVD_TOPOLOGY_SHIFT_ONE; topology <= BHVD_TOPOLOGY_ROUND_ROBIN; topology++) {
                for (int n = 2; n < 4; n++) {
                    const struct peers peers = peers_of(topology, n, 0, n == 3);
                    const int sizes[] = {other, other}, owns[] = {own, own};
                    const struct shares mine = peers_shares(topology, &peers, own, sizes);
                    const struct shares theirs = peers_shares(topology, &peers, other, owns);
                    CHECK_EQ(own * mine.peer[0] * theirs.of, other * theirs.peer[0] * mine.of);
                    int total = mine.own;
                    for (int p = 0; p < peers.count; p++)
                        total += mine.peer[p];
                    CHECK_EQ(total, mine.of);
                    CHECK(mine.own > 0);
                    CHECK(own != other || mine.own * peers.times == mine.peer[0]);
                }
            }
        }
    }
}

TEST(odd_ones_all_meet_and_pause_once_in_a_period)
{
    for (int n = 1; n < SIZES; n += 2) {
        int met[SIZES][SIZES] = {{0}};
        for (int round = 0; round < n; round++) {
            int pauses = 0;
            for (int i = 0; i < n; i++) {
                met[i][peer_of(n, i, round)]++;
                pauses += peer_of(n, i, round) == i;
                CHECK_EQ(peer_of(n, i, round), peer_of(n, i, round + n));
            }
            CHECK_EQ(pauses, 1);
        }
        for (int i = 0; i < n; i++) {
            for (int j = 0; j < n; j++)
                CHECK_EQ(met[i][j], 1);
        }
    }
}

TEST(shift_one_is_the_published_schedule)
{
    static const int FOUR[2][4] = {{2, 3, 0, 1}, {3, 2, 1, 0}}, EIGHT[8] = {5, 6, 7, 4, 3, 0, 1, 2};
    for (int i = 0; i < 8; i++) {
        CHECK_EQ(peer_of(8, i, 1), EIGHT[i]);
        CHECK_EQ(peer_of(4, i % 4, i / 4), FOUR[i / 4][i % 4]);
    }
}

TEST(ring_neighbors)
{
    for (int n = 3; n < SIZES; n++) {
        for (int i = 0; i < n; i++) {
            struct peers peers = peers_of(BHVD_TOPOLOGY_RING, n, i, i);
            CHECK_EQ(peers.count, 2);
            CHECK_EQ(peers.times, 1);
            CHECK_EQ(peers.index[0], i ? i - 1 : n - 1);
            CHECK_EQ(peers.index[1], i < n - 1 ? i + 1 : 0);
        }
    }
    struct peers two = peers_of(BHVD_TOPOLOGY_RING, 2, 1, 0), alone = peers_of(BHVD_TOPOLOGY_RING, 1, 0, 0);
    CHECK_EQ(two.count, 1);
    CHECK_EQ(two.index[0], 0);
    CHECK_EQ(two.times, 2);
    CHECK_EQ(alone.count, 0);
}
