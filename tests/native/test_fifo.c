// A list returns its elements in order, even if the expression for the list changes its value during the call.
#include "check.h"

#include <stddef.h>

#include "base/containers.h"

struct item {
    struct item *next;
};
struct items FIFO(struct item);

TEST(order_is_kept_when_the_list_was_empty_in_between)
{
    struct items items = {0};
    struct item all[3];
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 3; i++)
            fifo_put(&items, &all[i], next);
        for (int i = 0; i < 3; i++)
            CHECK(fifo_take(&items, next) == &all[i]);
        CHECK(!fifo_take(&items, next));
    }
}

TEST(the_last_can_be_removed)
{
    struct items items = {0};
    struct item all[3];
    fifo_put(&items, &all[0], next);
    fifo_put(&items, &all[1], next);
    CHECK(fifo_remove(&items, &all[0].next, next) == &all[1]);
    fifo_put(&items, &all[2], next);
    CHECK(fifo_take(&items, next) == &all[0] && fifo_take(&items, next) == &all[2] && !items.head);
}

// A link takes urgent messages first: taking the last urgent one changes the value of the expression.
TEST(which_list_is_asked_once)
{
    struct items urgent = {0}, others = {0};
    struct item all[3];
    fifo_put(&urgent, &all[0], next);
    fifo_put(&others, &all[1], next);
    CHECK(fifo_take(urgent.head ? &urgent : &others, next) == &all[0]);
    fifo_put(&others, &all[2], next);
    CHECK(!urgent.head);
    CHECK(fifo_take(&others, next) == &all[1] && fifo_take(&others, next) == &all[2] && !others.head);
}
