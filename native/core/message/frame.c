#include "core/message/frame.h"

#include "base/status.h"

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

void reason_put(struct bytes *out, const struct bhvd_error *error)
{
    const size_t size = strlen(error->message);
    bytes_put_u8(out, (uint8_t)error->cause);
    bytes_put_u32(out, (uint32_t)error->rank);
    bytes_put_u16(out, (uint16_t)size);
    bytes_put(out, error->message, size);
}

// A cause needs a rank; only a timeout may have several.
static bool is_blame(bhvd_cause cause, int64_t rank, int size)
{
    if (cause == BHVD_CAUSE_NONE || (cause == BHVD_CAUSE_TIMEOUT && rank == UINT32_MAX))
        return rank == UINT32_MAX;
    return cause < BHVD_CAUSE_COUNT && rank < size;
}

bool reason_take(struct bytes_reader *r, uint8_t status, int size, struct bhvd_error *error)
{
    const bhvd_cause cause = bytes_take_u8(r);
    const uint32_t rank = bytes_take_u32(r);
    const uint16_t message_size = bytes_take_u16(r);
    const unsigned char *message = bytes_take(r, message_size);
    if (!message || status < BHVD_ERR_ARGUMENT || status > BHVD_ERR_SYSTEM || !is_blame(cause, rank, size))
        return false;
    error_set(error, status, "%.*s", (int)message_size, (const char *)message);
    error_blame(error, cause, (int32_t)rank);
    return true;
}

void reason_departed(struct bhvd_error *error, int rank)
{
    error_set(error, BHVD_ERR_SHUTDOWN, "Horovod has been shut down. This was caused by an exception on one of the ranks or an "
              "attempt to allreduce, allgather or broadcast a tensor after one of the ranks finished execution. (rank %d left "
              "the job)", rank);
    error_blame(error, BHVD_CAUSE_LEFT, rank);
}
