#include "core/message/cached_run.h"

#include "core/message/frame.h"

void cached_run_put(struct cached_run *run, struct bytes *out, uint32_t id)
{
    if (run->count && run->count < CACHED_RUN_MAX && run->end == out->size && id == run->id + run->count) {
        run->count++;
        if (!out->failed)
            memcpy(out->data + out->size - sizeof run->count, &run->count, sizeof run->count);
        return;
    }
    *run = (struct cached_run){.id = id, .count = 1};
    bytes_put_u8(out, ITEM_CACHED);
    bytes_put_u32(out, run->id);
    bytes_put_u32(out, run->count);
    run->end = out->size;
}

struct cached_run cached_run_take(struct bytes_reader *r)
{
    struct cached_run run = {.id = bytes_take_u32(r)};
    run.count = bytes_take_u32(r);
    r->failed |= run.count == 0 || run.count > CACHED_RUN_MAX;
    return run;
}
