// Bundles of requests: ranks with the same items share them, and each rank's order is kept. Also the rank sets in them.
#include "check.h"

#include "core/negotiation/relay.h"

enum { RANKS = 200 };

static struct rank_set set_of(const int *ranks, int count)
{
    struct rank_set set;
    CHECK(rank_set_init(&set, RANKS));
    for (int i = 0; i < count; i++)
        rank_set_add(&set, ranks[i]);
    return set;
}

#define SET(...) set_of((const int[]){__VA_ARGS__}, (int)(sizeof((const int[]){__VA_ARGS__}) / sizeof(int)))

static struct bundle bundle_of_job(void)
{
    struct bundle bundle = {0};
    CHECK(bundle_init(&bundle, RANKS));
    return bundle;
}

// Items of one byte each.
static void put(struct bundle *bundle, struct rank_set from, const char *items)
{
    const unsigned char *at = (const unsigned char *)items;
    bundle_put(bundle, &from, (struct bytes_reader){at, at + strlen(items), false});
    CHECK(!bundle_failed(bundle));
    rank_set_fini(&from);
}

// Groups as text, such as "0,2: 7 20 | 1: 3".
static const char *text_of(struct bundle *bundle)
{
    static char text[4096];
    size_t used = 0;
    struct bytes_reader r = bytes_read(bundle_write(bundle));
    struct rank_set set = SET(0);
    text[0] = '\0';
    while (r.at < r.end) {
        rank_set_take(&r, &set);
        uint32_t size = bytes_take_u32(&r);
        const unsigned char *items = bytes_take(&r, size);
        CHECK(!r.failed);
        used += (size_t)snprintf(text + used, sizeof text - used, "%s", used ? " | " : "");
        for (int rank = rank_set_next(&set, 0), first = 1; rank >= 0; rank = rank_set_next(&set, rank + 1), first = 0)
            used += (size_t)snprintf(text + used, sizeof text - used, "%s%d", first ? "" : ",", rank);
        used += (size_t)snprintf(text + used, sizeof text - used, ":");
        for (uint32_t i = 0; i < size; i++)
            used += (size_t)snprintf(text + used, sizeof text - used, " %d", items[i]);
    }
    rank_set_fini(&set);
    return text;
}

TEST(ranks_with_the_same_items_share_them)
{
    struct bundle bundle = bundle_of_job();
    put(&bundle, SET(3), "\1\2");
    put(&bundle, SET(4, 199), "\1\2");
    put(&bundle, SET(5), "\1\3");
    put(&bundle, SET(6), "\1");
    CHECK_STR_EQ(text_of(&bundle), "3,4,199: 1 2 | 5: 1 3 | 6: 1");
    bundle_clear(&bundle);
    CHECK_EQ(bundle_size(&bundle), 0);
    CHECK_STR_EQ(text_of(&bundle), "");
    bundle_fini(&bundle);
}

TEST(each_ranks_order_stays)
{
    struct bundle bundle = bundle_of_job();
    put(&bundle, SET(0), "\1");
    put(&bundle, SET(1), "\2\1");
    put(&bundle, SET(0), "\2\1");
    put(&bundle, SET(0), "\1");
    put(&bundle, SET(1), "\1");
    put(&bundle, SET(1), "\1");                // twice by the same rank: two items
    CHECK_STR_EQ(text_of(&bundle), "0: 1 | 0,1: 2 1 | 0,1: 1 | 1: 1");
    bundle_fini(&bundle);
}

TEST(items_of_the_same_ranks_are_one_group)
{
    struct bundle bundle = bundle_of_job();
    put(&bundle, SET(7), "\1");
    put(&bundle, SET(7), "\1");
    put(&bundle, SET(7), "\2");
    CHECK_STR_EQ(text_of(&bundle), "7: 1 1 2");
    put(&bundle, SET(7), "\2");                // after the message has been written
    CHECK_STR_EQ(text_of(&bundle), "7: 1 1 2 | 7: 2");
    bundle_fini(&bundle);
}

TEST(sets_of_ranks_travel)
{
    struct rank_set sets[] = {SET(0), SET(199), SET(0, 1, 2, 62, 63, 64, 65, 127, 128, 199)}, taken = SET(7);
    for (int i = 0; i < 3; i++) {
        struct bytes out = {0};
        rank_set_put(&out, &sets[i]);
        struct bytes_reader r = bytes_read(&out);
        rank_set_take(&r, &taken);
        CHECK(!r.failed && r.at == r.end && rank_set_equals(&taken, &sets[i]));
        r = (struct bytes_reader){out.data, out.data + out.size - 1, false};
        rank_set_take(&r, &taken);
        CHECK(r.failed);
        bytes_fini(&out);
        rank_set_fini(&sets[i]);
    }
    const uint32_t malformed[][4] = {{5, 0, 9, 1}, {199, 2, 0, 0}, {RANKS, 1, 0, 0}, {5, 2, 6, 1},
                                     {5, 2, 7, 1}, {9, 1, 5, 1},   {5, UINT32_MAX, 9, 1}};
    for (size_t i = 0; i < sizeof malformed / sizeof *malformed; i++) {
        struct bytes out = {0};
        bytes_put_u32(&out, 2);
        bytes_put(&out, malformed[i], sizeof malformed[i]);
        struct bytes_reader r = bytes_read(&out);
        rank_set_take(&r, &taken);
        CHECK(r.failed);
        bytes_fini(&out);
    }
    rank_set_fini(&taken);
}
