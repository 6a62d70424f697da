// The shape of the tree: every rank is below rank 0, on paths that parents and children agree on; no rank has more children than
// the fan-out on its own host, and as many on others.
#include "check.h"

#include "core/negotiation/relay.h"

enum { RANKS_MAX = 300 };

static void init_all(struct tree *trees, const int *host_of, int size, int fanout)
{
    for (int rank = 0; rank < size; rank++) {
        trees[rank] = (struct tree){0};
        CHECK_STATUS(tree_init(&trees[rank], host_of, size, rank, fanout), BHVD_OK);
    }
}

static void fini_all(struct tree *trees, int size)
{
    for (int rank = 0; rank < size; rank++)
        tree_fini(&trees[rank]);
}

static void check_shape(const int *host_of, int size, int fanout)
{
    static struct tree trees[RANKS_MAX];
    init_all(trees, host_of, size, fanout);
    for (int rank = 0; rank < size; rank++) {
        int parent = trees[rank].parent, local = 0, remote = 0;
        CHECK(rank ? tree_child(&trees[parent], rank) != NULL : parent == -1);
        for (int i = 0; i < trees[rank].child_count; i++) {
            const struct tree_child *child = &trees[rank].children[i];
            CHECK_EQ(trees[child->rank].parent, rank);
            CHECK(rank_set_has(&child->below, child->rank) && !rank_set_has(&child->below, rank));
            local += host_of[child->rank] == host_of[rank];
            remote += host_of[child->rank] != host_of[rank];
        }
        CHECK(local <= fanout && remote <= fanout);
        // Descends from rank 0 to the child above the rank.
        int at = 0, hops = 0;
        while (at != rank) {
            struct tree_child *next = tree_child_towards(&trees[at], rank);
            CHECK(next != NULL && ++hops < size);
            at = next->rank;
        }
    }
    fini_all(trees, size);
}

TEST(every_rank_is_found_from_rank_0)
{
    int host_of[RANKS_MAX];
    for (int fanout = 1; fanout <= 16; fanout += fanout < 3 ? 1 : 13) {
        for (int size = 1; size < RANKS_MAX; size = size * 2 + 1) {
            for (int per_host = 1; per_host <= size; per_host = per_host * 3 + 1) {
                for (int rank = 0; rank < size; rank++)
                    host_of[rank] = rank / per_host;
                check_shape(host_of, size, fanout);
                int hosts = (size + per_host - 1) / per_host;
                for (int rank = 0; rank < size; rank++)
                    host_of[rank] = rank % hosts;               // round-robin over the hosts
                check_shape(host_of, size, fanout);
            }
        }
    }
}

// The position among the ranks of a host, and the rank at a position, by a search over all ranks.
static int index_on_host(const int *host_of, int rank)
{
    int before = 0;
    for (int other = 0; other < rank; other++)
        before += host_of[other] == host_of[rank];
    return before;
}

static int rank_at(const int *host_of, int host, int index)
{
    int rank = 0;
    while (host_of[rank] != host || index_on_host(host_of, rank) != index)
        rank++;
    return rank;
}

static int expected_parent(const int *host_of, int rank, int fanout)
{
    const int host = host_of[rank], index = index_on_host(host_of, rank);
    if (fanout == 0 || rank == 0)
        return rank ? 0 : -1;
    return index ? rank_at(host_of, host, (index - 1) / fanout) : rank_at(host_of, (host - 1) / fanout, 0);
}

static void check_parents(const int *host_of, int size, int fanout)
{
    static int parents[RANKS_MAX];
    static bool talks[RANKS_MAX][RANKS_MAX];
    CHECK(tree_parents(host_of, size, fanout ? fanout : TREE_STAR, parents));
    for (int rank = 0; rank < size; rank++) {
        const struct bhvd_context_options options = {.rank = rank, .size = size, .negotiation = fanout ? "tree" : "star",
                                                     .negotiation_fanout = fanout};
        CHECK_EQ(parents[rank], expected_parent(host_of, rank, fanout));
        CHECK(parents[rank] < rank);
        CHECK(tree_choose(&options, host_of, talks[rank]));
    }
    for (int one = 0; one < size; one++)
        for (int other = 0; other < one; other++) {
            CHECK_EQ(talks[one][other], other == 0 || parents[one] == other);
            CHECK_EQ(talks[other][one], talks[one][other]);
        }
}

TEST(parents_are_those_that_the_shape_says)
{
    int host_of[RANKS_MAX];
    unsigned seed = 1;
    for (int fanout = 0; fanout <= 16; fanout += fanout < 3 ? 1 : 13) {
        for (int size = 1; size <= 90; size += 1 + size / 8) {
            for (int rank = 0, hosts = 0; rank < size; rank++) {        // a new host, or an earlier one
                seed = seed * 1103515245 + 12345;
                const int host = hosts && seed >> 16 & 3 ? (int)(seed >> 18) % hosts : hosts;
                host_of[rank] = host;
                hosts += host == hosts;
            }
            check_parents(host_of, size, fanout);
            check_shape(host_of, size, fanout ? fanout : size);
        }
    }
}

TEST(a_star_is_a_tree_without_relays)
{
    const int host_of[] = {0, 0, 1, 1, 2};
    for (int rank = 0; rank < 5; rank++) {
        struct tree tree = {0};
        CHECK_STATUS(tree_init(&tree, host_of, 5, rank, TREE_STAR), BHVD_OK);
        CHECK_EQ(tree.child_count, rank ? 0 : 4);
        CHECK_EQ(tree.parent, rank ? 0 : -1);
        for (int other = 0; other < 5; other++)
            CHECK((tree_child(&tree, other) != NULL) == (rank == 0 && other > 0));
        tree_fini(&tree);
    }
}

// The search for a rank finds the child above it.
static void check_found(struct tree *tree, int size)
{
    for (int rank = 0; rank < size; rank++) {
        const struct tree_child *expected = NULL;
        for (int i = 0; i < tree->child_count; i++)
            expected = rank_set_has(&tree->children[i].below, rank) ? &tree->children[i] : expected;
        CHECK(tree_child_towards(tree, rank) == expected);
        CHECK(tree_child(tree, rank) == (expected && expected->rank == rank ? expected : NULL));
    }
}

TEST(who_is_below_whom_is_known)
{
    enum { SIZE = 40 };
    int host_of[SIZE];
    for (int rank = 0; rank < SIZE; rank++)
        host_of[rank] = rank / 7;
    for (int rank = 0; rank < SIZE; rank++) {
        struct tree tree = {0};
        CHECK_STATUS(tree_init(&tree, host_of, SIZE, rank, 1 + rank % 3), BHVD_OK);
        check_found(&tree, SIZE);
        tree_fini(&tree);
    }
}

TEST(only_the_first_rank_of_a_host_speaks_for_it)
{
    const int host_of[] = {0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3};
    const int expected[] = {-1, 0, 0, 0, 3, 3, 0, 6, 6, 3, 9, 9};
    for (int rank = 0; rank < 12; rank++) {
        struct tree tree = {0};
        CHECK_STATUS(tree_init(&tree, host_of, 12, rank, 2), BHVD_OK);
        CHECK_EQ(tree.parent, expected[rank]);
        CHECK(rank || tree.child_count == 4);
        tree_fini(&tree);
    }
}
