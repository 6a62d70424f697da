// The shape of the tree: every rank is below rank 0, by ways that parents and children agree on; no rank has more children
// than the fan-out on its host and as many on others; and what rank 0 adopts is its own.
#include "check.h"

#include "core/tree.h"

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
        int parent = trees[0].parents[rank], local = 0, remote = 0;
        CHECK(rank ? tree_child(&trees[parent], rank) != NULL : parent == -1);
        for (int i = 0; i < trees[rank].child_count; i++) {
            const struct tree_child *child = &trees[rank].children[i];
            CHECK(trees[child->rank].parents[child->rank] == rank);
            CHECK(rank_set_has(&child->below, child->rank) && !rank_set_has(&child->below, rank));
            local += host_of[child->rank] == host_of[rank];
            remote += host_of[child->rank] != host_of[rank];
        }
        CHECK(local <= fanout && remote <= fanout);
        // Down from rank 0, always to the child that the rank is below.
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
                    host_of[rank] = rank % hosts;               // dealt to the hosts in turn
                check_shape(host_of, size, fanout);
            }
        }
    }
}

TEST(only_the_first_rank_of_a_host_speaks_for_it)
{
    const int host_of[] = {0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3};
    const int expected[] = {-1, 0, 0, 0, 3, 3, 0, 6, 6, 3, 9, 9};
    struct tree tree = {0};
    CHECK_STATUS(tree_init(&tree, host_of, 12, 0, 2), BHVD_OK);
    for (int rank = 0; rank < 12; rank++)
        CHECK_EQ(tree.parents[rank], expected[rank]);
    CHECK_EQ(tree.child_count, 4);
    tree_fini(&tree);
}

// A chain 0 - 1 - 2 - 3: whoever is adopted takes along who is below it still.
TEST(rank_0_adopts)
{
    const int host_of[4] = {0};
    struct tree tree = {0};
    CHECK_STATUS(tree_init(&tree, host_of, 4, 0, 1), BHVD_OK);
    CHECK_EQ(tree_child_towards(&tree, 3)->rank, 1);
    CHECK_STATUS(tree_adopt(&tree, 3), BHVD_OK);
    CHECK_EQ(tree_child_towards(&tree, 3)->rank, 3);
    CHECK_EQ(tree_child_towards(&tree, 2)->rank, 1);
    CHECK_STATUS(tree_adopt(&tree, 2), BHVD_OK);
    CHECK_EQ(tree_child_towards(&tree, 2)->rank, 2);
    CHECK(!rank_set_has(&tree_child(&tree, 2)->below, 3));
    tree_fini(&tree);

    CHECK_STATUS(tree_init(&tree, host_of, 4, 0, 1), BHVD_OK);
    CHECK_STATUS(tree_adopt(&tree, 2), BHVD_OK);
    CHECK_EQ(tree_child_towards(&tree, 3)->rank, 2);
    CHECK_EQ(tree_child_towards(&tree, 1)->rank, 1);
    tree_fini(&tree);
}
