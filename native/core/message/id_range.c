#include "core/message/id_range.h"

#include "core/message/frame.h"

void id_range_put(struct id_range *range, struct bytes *out, uint32_t id)
{
    if (range->count && range->count < ID_RANGE_MAX && range->end == out->size && id == range->id + range->count) {
        range->count++;
        if (!out->failed)
            memcpy(out->data + out->size - sizeof range->count, &range->count, sizeof range->count);
        return;
    }
    *range = (struct id_range){.id = id, .count = 1};
    bytes_put_u8(out, ITEM_CACHED);
    bytes_put_u32(out, range->id);
    bytes_put_u32(out, range->count);
    range->end = out->size;
}

struct id_range id_range_take(struct bytes_reader *r)
{
    struct id_range range = {.id = bytes_take_u32(r)};
    range.count = bytes_take_u32(r);
    r->failed |= range.count == 0 || range.count > ID_RANGE_MAX;
    return range;
}
