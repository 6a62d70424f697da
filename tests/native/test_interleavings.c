// Every interleaving of three ranks that negotiate in a star.
#include "interleavings.h"

TEST(all_do_three_tensors_and_join) { explore_all((struct scenario){{3, 3, 3}}); }

TEST(ranks_join_after_different_numbers) { explore_all((struct scenario){{3, 0, 1}}); }

TEST(ranks_join_one_after_the_other) { explore_all((struct scenario){{1, 2, 3}}); }

TEST(the_coordinator_joins_first) { explore_all((struct scenario){{0, 2, 2}}); }

TEST(a_rank_leaves_while_others_need_it) { explore_all((struct scenario){{2, 2, -2}}); }

TEST(a_rank_leaves_what_it_has_posted) { explore_all((struct scenario){{3, 3, -3}}); }

TEST(the_coordinator_leaves_while_others_need_it) { explore_all((struct scenario){{-2, 2, 2}}); }
