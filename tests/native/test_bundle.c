// Bundles of requests: an item that all ranks request is merged, however each split it; each rank's order is kept;
// malformed ones are rejected. Also the rank sets in them.
#include "check.h"

#include "core/message/bundle.h"
#include "core/message/id_range.h"
#include "core/negotiation/inline_payload.h"
#include "core/message/frame.h"

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

static void put_cached(struct bytes *out, uint32_t id, uint32_t count)
{
    bytes_put_u8(out, ITEM_CACHED);
    bytes_put_u32(out, id);
    bytes_put_u32(out, count);
}

static void put_full(struct bytes *out, const char *text)
{
    bytes_put_u8(out, ITEM_FULL);
    bytes_put_u32(out, (uint32_t)strlen(text));
    bytes_put(out, text, strlen(text));
}

static bool add(struct bundle *bundle, int rank, struct bytes *items)
{
    struct rank_set from = SET(rank);
    bool fine = bundle_put(bundle, &from, bytes_read(items));
    rank_set_fini(&from);
    bytes_fini(items);
    *items = (struct bytes){0};
    return fine;
}

// Groups as text, such as "0-2:c7x3 c20x1 | 1:fhello".
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
        struct bytes_reader items = {r.at, r.at + size, false};
        CHECK(bytes_take(&r, size) != NULL);
        used += (size_t)snprintf(text + used, sizeof text - used, "%s", used ? " | " : "");
        for (int rank = rank_set_next(&set, 0), first = 1; rank >= 0; rank = rank_set_next(&set, rank + 1), first = 0)
            used += (size_t)snprintf(text + used, sizeof text - used, "%s%d", first ? "" : ",", rank);
        used += (size_t)snprintf(text + used, sizeof text - used, ":");
        while (items.at < items.end) {
            enum item_tag tag = bytes_take_u8(&items);
            if (tag == ITEM_CACHED) {
                struct id_range range = id_range_take(&items);
                used += (size_t)snprintf(text + used, sizeof text - used, " %ux%u", range.id, range.count);
            } else if (tag == ITEM_FULL) {
                uint32_t length = bytes_take_u32(&items);
                used += (size_t)snprintf(text + used, sizeof text - used, " %.*s", (int)length, bytes_take(&items, length));
            } else {
                CHECK(tag == ITEM_LEFT);
                used += (size_t)snprintf(text + used, sizeof text - used, " left");
            }
        }
        CHECK(!items.failed);
    }
    CHECK(!r.failed);
    rank_set_fini(&set);
    return text;
}

#define CHECK_TEXT(bundle, expected)                                                                      \
    do {                                                                                                  \
        const char *got = text_of(bundle);                                                                \
        if (strcmp(got, expected) != 0)                                                                   \
            check_fail(__FILE__, __LINE__, "\"%s\", not \"%s\"", got, expected);                          \
    } while (0)

TEST(what_all_say_is_one_item_however_they_cut_it)
{
    struct bundle bundle = {0};
    struct bytes items = {0};
    put_cached(&items, 1, 161);
    CHECK(add(&bundle, 3, &items));
    put_cached(&items, 1, 60);
    put_cached(&items, 61, 101);
    CHECK(add(&bundle, 4, &items));
    for (uint32_t id = 161; id; id--)
        put_cached(&items, id, 1);
    CHECK(add(&bundle, 199, &items));
    CHECK_TEXT(&bundle, "3,4,199: 1x161");
    bundle_fini(&bundle);
}

TEST(what_some_say_is_theirs)
{
    struct bundle bundle = {0};
    struct bytes items = {0};
    put_cached(&items, 10, 10);
    CHECK(add(&bundle, 0, &items));
    put_cached(&items, 5, 8);
    put_cached(&items, 15, 2);
    put_cached(&items, 18, 10);
    CHECK(add(&bundle, 1, &items));
    CHECK_TEXT(&bundle, "1: 5x5 | 0,1: 10x3 | 0: 13x2 | 0,1: 15x2 | 0: 17x1 | 0,1: 18x2 | 1: 20x8");
    bundle_fini(&bundle);
}

// Every pair of id ranges in a small space, compared with the sets of ids.
TEST(any_two_runs)
{
    enum { IDS = 7 };
    for (int code = 0; code < IDS * IDS * IDS * IDS; code++) {
        uint32_t id[2] = {(uint32_t)(code % IDS), (uint32_t)(code / IDS % IDS)};
        uint32_t count[2] = {(uint32_t)(code / IDS / IDS % IDS) + 1, (uint32_t)(code / IDS / IDS / IDS) + 1};
        int said[4 * IDS] = {0}, heard[4 * IDS] = {0};
        struct bundle bundle = {0};
        struct bytes items = {0};
        for (int i = 0; i < 2; i++) {
            put_cached(&items, id[i], count[i]);
            CHECK(add(&bundle, i, &items));
            for (uint32_t k = 0; k < count[i]; k++)
                said[id[i] + k] |= 1 << i;
        }
        for (int i = 0; i < bundle.run_count; i++) {
            const struct bundle_run *run = &bundle.runs[i];
            for (uint64_t k = 0; k < run->count; k++) {
                CHECK(heard[run->id + k] == 0);
                heard[run->id + k] = (int)run->ranks.words[0];
            }
        }
        CHECK(memcmp(said, heard, sizeof said) == 0);
        bundle_fini(&bundle);
    }
}

TEST(each_ranks_order_stays)
{
    struct bundle bundle = {0};
    struct bytes items = {0};
    put_cached(&items, 5, 2);
    put_full(&items, "new");
    put_full(&items, "newer");
    put_cached(&items, 1, 2);
    CHECK(add(&bundle, 0, &items));
    put_cached(&items, 1, 6);
    bytes_put_u8(&items, ITEM_LEFT);
    CHECK(add(&bundle, 1, &items));
    CHECK_TEXT(&bundle, "0: 5x2 | 0: new newer | 0,1: 1x2 | 1: 3x4 | 1: left");
    bundle_clear(&bundle);
    CHECK(bundle_is_empty(&bundle));
    bundle_fini(&bundle);
}

TEST(long_runs_are_not_joined_beyond_what_one_item_may_hold)
{
    struct bundle bundle = {0};
    struct bytes items = {0};
    put_cached(&items, 1, ID_RANGE_MAX);
    put_cached(&items, 1 + ID_RANGE_MAX, 2);
    put_cached(&items, UINT32_MAX, 1);
    CHECK(add(&bundle, 0, &items));
    CHECK_TEXT(&bundle, "0: 1x65536 65537x2 4294967295x1");
    bundle_fini(&bundle);
}

TEST(malformed_items_are_refused)
{
    struct bundle bundle = {0};
    struct bytes items = {0};
    put_cached(&items, UINT32_MAX, 2);              // beyond the last id
    CHECK(!add(&bundle, 0, &items));
    put_cached(&items, 1, 0);
    CHECK(!add(&bundle, 0, &items));
    put_full(&items, "cut short");
    items.size--;
    CHECK(!add(&bundle, 0, &items));
    inline_payload_put(&items, 1, "1234", 4);       // with a relay there are no inline payloads
    CHECK(!add(&bundle, 0, &items));
    bytes_put_u8(&items, ITEM_PAIRWISE);
    CHECK(!add(&bundle, 0, &items));
    bundle_fini(&bundle);
}

// A whole message of one rank may contain inline payloads, and is kept unchanged.
TEST(whole_items_stay_as_they_are)
{
    struct bundle bundle = {0};
    struct bytes items = {0}, expected = {0};
    struct rank_set from = SET(7);
    for (int i = 0; i < 2; i++) {
        const size_t before = items.size;
        put_cached(&items, 20, 1);
        inline_payload_put(&items, 3, "1234", 4);
        put_cached(&items, 19, 1);
        put_full(&items, "hello");
        bundle_put_whole(&bundle, &from, (struct bytes_reader){items.data + before, items.data + items.size, false});
    }
    CHECK_EQ(bundle.run_count, 0);
    rank_set_put(&expected, &from);
    bytes_put_u32(&expected, (uint32_t)items.size);
    bytes_put(&expected, items.data, items.size);
    const struct bytes *out = bundle_write(&bundle);
    CHECK_EQ(out->size, expected.size);
    CHECK(memcmp(out->data, expected.data, expected.size) == 0);
    bytes_fini(&items);
    bytes_fini(&expected);
    rank_set_fini(&from);
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
