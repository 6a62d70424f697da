// Every interleaving of three and four ranks that negotiate in a tree, here a chain: each rank relays for the next.
#include "interleavings.h"

TEST(the_relay_and_the_last_join_early) { explore_all((struct scenario){{2, 1, 1}, .fanout = 1}); }

TEST(ranks_join_after_different_numbers) { explore_all((struct scenario){{1, 0, 2}, .fanout = 1}); }

TEST(the_relay_joins_last) { explore_all((struct scenario){{1, 2, 1}, .fanout = 1}); }

TEST(a_relayed_rank_leaves_while_others_need_it) { explore_all((struct scenario){{2, 2, -2}, .fanout = 1}); }

TEST(a_relay_leaves_while_others_need_it) { explore_all((struct scenario){{2, -2, 2}, .fanout = 1}); }

TEST(the_coordinator_leaves_while_others_need_it_and_a_relay) { explore_all((struct scenario){{-2, 1, 1}, .fanout = 1}); }

// The remaining ranks need every message that was in flight through the relay, in order.
TEST(a_relay_leaves_and_others_go_on) { explore_all((struct scenario){{3, -1, 3}, .fanout = 1, .ends_only = true}); }

TEST(two_relays_leave_and_others_go_on)
{
    explore_all((struct scenario){{1, -1, -1, 1}, .ranks = 4, .fanout = 1, .ends_only = true});
}
