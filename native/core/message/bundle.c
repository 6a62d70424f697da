#include "core/message/bundle.h"

#include "base/array.h"
#include "core/message/id_range.h"
#include "core/message/frame.h"

static void clear_runs(struct bundle *bundle)
{
    for (int i = 0; i < bundle->run_count; i++)
        rank_set_fini(&bundle->runs[i].ranks);
    bundle->run_count = 0;
}

void bundle_fini(struct bundle *bundle)
{
    clear_runs(bundle);
    free(bundle->runs);
    bytes_fini(&bundle->out);
    *bundle = (struct bundle){0};
}

void bundle_clear(struct bundle *bundle)
{
    clear_runs(bundle);
    bundle->out.size = bundle->last_items = 0;
}

// ranks may belong to a run of the bundle.
static bool insert_run(struct bundle *bundle, int at, uint64_t id, uint64_t count, const struct rank_set *ranks)
{
    struct bundle_run run = {.id = id, .count = count};
    if (!rank_set_init(&run.ranks, ranks->size))
        return false;
    rank_set_copy(&run.ranks, ranks);
    if (!array_reserve(bundle->runs, bundle->run_count, bundle->run_capacity, 16)) {
        rank_set_fini(&run.ranks);
        return false;
    }
    memmove(&bundle->runs[at + 1], &bundle->runs[at], (size_t)(bundle->run_count - at) * sizeof run);
    bundle->runs[at] = run;
    bundle->run_count++;
    return true;
}

// Splits a run before `id`, which is inside it.
static bool split_run(struct bundle *bundle, int at, uint64_t id)
{
    struct bundle_run *run = &bundle->runs[at];
    uint64_t before = id - run->id;
    if (!insert_run(bundle, at + 1, id, run->count - before, &run->ranks))
        return false;
    bundle->runs[at].count = before;
    return true;
}

static int first_run_ending_after(const struct bundle *bundle, uint64_t id)
{
    int low = 0, high = bundle->run_count;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (bundle->runs[middle].id + bundle->runs[middle].count > id)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

// False: no memory.
static bool add_run(struct bundle *bundle, uint64_t id, uint64_t end, const struct rank_set *from)
{
    for (int at = first_run_ending_after(bundle, id); id < end; at++) {
        bool is_last = at == bundle->run_count;
        uint64_t begins = is_last ? end : bundle->runs[at].id;
        if (id < begins) {                          // no run covers these ids yet
            begins = begins < end ? begins : end;
            if (!insert_run(bundle, at, id, begins - id, from))
                return false;
            id = begins;
            continue;
        }
        if (begins < id) {
            if (!split_run(bundle, at, id))
                return false;
            continue;                               // continue with the second part
        }
        if (id + bundle->runs[at].count > end && !split_run(bundle, at, end))
            return false;
        rank_set_unite(&bundle->runs[at].ranks, from);
        id += bundle->runs[at].count;
    }
    return true;
}

static size_t begin_group(struct bytes *out, const struct rank_set *ranks)
{
    rank_set_put(out, ranks);
    bytes_put_u32(out, 0);
    return out->size;
}

static void end_group(struct bytes *out, size_t begin)
{
    uint32_t size = (uint32_t)(out->size - begin);
    if (!out->failed)
        memcpy(out->data + begin - sizeof size, &size, sizeof size);
}

// Merges adjacent runs of the same ranks.
static void write_runs(struct bundle *bundle)
{
    struct bytes *out = &bundle->out;
    if (bundle->run_count)
        bundle->last_items = 0;
    for (int i = 0; i < bundle->run_count;) {
        const struct rank_set *ranks = &bundle->runs[i].ranks;
        size_t begin = begin_group(out, ranks);
        while (i < bundle->run_count && rank_set_equals(&bundle->runs[i].ranks, ranks)) {
            uint64_t id = bundle->runs[i].id, count = 0;
            while (i < bundle->run_count && bundle->runs[i].id == id + count &&
                   count + bundle->runs[i].count <= ID_RANGE_MAX && rank_set_equals(&bundle->runs[i].ranks, ranks))
                count += bundle->runs[i++].count;
            bytes_put_u8(out, ITEM_CACHED);
            bytes_put_u32(out, (uint32_t)id);
            bytes_put_u32(out, (uint32_t)count);
        }
        end_group(out, begin);
    }
    clear_runs(bundle);
}

static bool put_cached(struct bundle *bundle, const struct rank_set *from, struct bytes_reader *items)
{
    struct id_range range = id_range_take(items);
    uint64_t end = (uint64_t)range.id + range.count;
    if (items->failed || end > UINT64_C(1) << 32)
        return false;
    if (!add_run(bundle, range.id, end, from))
        bundle->out.failed = true;
    return true;
}

// Appends the item that began at `tag`, unchanged; to the last group if that has the same ranks.
static void put_item(struct bundle *bundle, const struct rank_set *from, const unsigned char *tag, size_t size)
{
    struct bytes *out = &bundle->out;
    write_runs(bundle);                 // earlier requests of any rank come before
    size_t at = out->size, items = begin_group(out, from), head = items - at - sizeof(uint32_t);
    if (!out->failed && bundle->last_items && bundle->last_items - bundle->last_at == items - at &&
        memcmp(out->data + bundle->last_at, out->data + at, head) == 0) {
        out->size = at;
    } else {
        bundle->last_at = at;
        bundle->last_items = items;
    }
    bytes_put(out, tag, size);
    end_group(out, bundle->last_items);
}

void bundle_put_whole(struct bundle *bundle, const struct rank_set *from, struct bytes_reader items)
{
    put_item(bundle, from, items.at, (size_t)(items.end - items.at));
}

bool bundle_put(struct bundle *bundle, const struct rank_set *from, struct bytes_reader items)
{
    while (items.at < items.end) {
        const unsigned char *begin = items.at;
        enum item_tag tag = bytes_take_u8(&items);
        if (tag == ITEM_CACHED) {
            if (!put_cached(bundle, from, &items))
                return false;
            continue;
        }
        if (tag == ITEM_FULL || tag == ITEM_REVOKED || tag == ITEM_RESENT)
            bytes_take(&items, bytes_take_u32(&items));
        else if (tag != ITEM_LEFT)
            return false;                                   // no inline payloads in a tree
        if (items.failed)
            return false;
        put_item(bundle, from, begin, (size_t)(items.at - begin));
    }
    return true;
}

const struct bytes *bundle_write(struct bundle *bundle)
{
    write_runs(bundle);
    return &bundle->out;
}
