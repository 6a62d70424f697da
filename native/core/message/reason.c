#include "core/message/reason.h"

#include "base/status.h"

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
