#include "core/message/bundle.h"

bool bundle_init(struct bundle *bundle, int size) { return rank_set_init(&bundle->ranks, size); }

void bundle_fini(struct bundle *bundle)
{
    rank_set_fini(&bundle->ranks);
    bytes_fini(&bundle->items);
    bytes_fini(&bundle->out);
}

void bundle_clear(struct bundle *bundle) { bundle->out.size = bundle->items.size = 0; }

void bundle_put(struct bundle *bundle, const struct rank_set *from, struct bytes_reader items)
{
    const size_t size = (size_t)(items.end - items.at), last = bundle->items.size;
    if (last && last == size && !rank_set_overlaps(&bundle->ranks, from) && memcmp(bundle->items.data, items.at, size) == 0) {
        rank_set_unite(&bundle->ranks, from);
        return;
    }
    if (last && !rank_set_equals(&bundle->ranks, from))
        bundle_write(bundle);
    rank_set_copy(&bundle->ranks, from);
    bytes_put(&bundle->items, items.at, size);
}

const struct bytes *bundle_write(struct bundle *bundle)
{
    if (bundle->items.size) {
        rank_set_put(&bundle->out, &bundle->ranks);
        bytes_put_u32(&bundle->out, (uint32_t)bundle->items.size);
        bytes_put(&bundle->out, bundle->items.data, bundle->items.size);
        bundle->items.size = 0;
    }
    return &bundle->out;
}
