#include "core/negotiation/response.h"

#include "base/status.h"
#include "core/context/context.h"
#include "core/message/frame.h"
#include "core/negotiation/relay.h"
#include "core/negotiation/window.h"

// Requests of one rank by unknown ids without a reply, beyond the cache's capacity: far more than a rank ever has.
enum { CACHE_MISS_MAX = 1 << 16 };

void response_put_header(struct bytes *out, const struct operation_key *key, uint32_t id, bhvd_status status)
{
    bytes_put_u8(out, ITEM_FULL);
    bytes_put_u16(out, key->name_size);
    bytes_put(out, key->name, key->name_size);
    bytes_put_u32(out, id);
    bytes_put_u8(out, (uint8_t)status);
}

static void put_error(struct bytes *out, const struct operation_key *key, const struct bhvd_error *error)
{
    response_put_header(out, key, 0, error->status);
    reason_put(out, error);
}

// Returns the window of the execution with the last number.
static uint8_t put_in_window(struct coordinator *c, size_t nbytes)
{
    size_t newest_first[LINK_MATCH_QUEUES] = {0};
    int count = 0;
    c->nbytes_of[c->response_number % LINK_MATCH_QUEUES] = nbytes;
    for (; count < LINK_MATCH_QUEUES && (uint64_t)count < c->response_number; count++)
        newest_first[count] = c->nbytes_of[(c->response_number - (uint64_t)count) % LINK_MATCH_QUEUES];
    return (uint8_t)window_of(newest_first, count);
}

void response_begin(struct coordinator *c, uint32_t process_set, uint32_t count, size_t nbytes, bool alone)
{
    struct bytes *out = &c->out;
    out->size = 0;
    c->range = (struct id_range){0};
    bytes_put_i64(out, (int64_t)++c->response_number);
    bytes_put_u8(out, put_in_window(c, alone ? WINDOW_ALONE : nbytes));
    bytes_put_u32(out, c->network.alpha_ns);
    bytes_put_u32(out, c->network.beta_ps);
    bytes_put_u32(out, process_set);
    bytes_put_u32(out, count);
}

bhvd_status response_send(bhvd_context *ctx, const struct process_set *set)
{
    return relay_send_to_set(ctx, set, FRAME_RESPONSE, &ctx->coordinator->out);
}

bhvd_status response_send_to(bhvd_context *ctx, int rank)
{
    return relay_send_to(ctx, rank, FRAME_RESPONSE, &ctx->coordinator->out);
}

bhvd_status response_refuse(bhvd_context *ctx, int rank, const struct operation_key *key, const struct bhvd_error *error)
{
    response_begin(ctx->coordinator, key->process_set, 1, 0, false);
    put_error(&ctx->coordinator->out, key, error);
    return response_send_to(ctx, rank);
}

bhvd_status response_refuse_all(bhvd_context *ctx, const struct process_set *set, const struct pending *pending,
                                const struct bhvd_error *error)
{
    bhvd_status status = BHVD_OK;
    for (int i = 0; i < pending->size && !status; i++) {
        if (pending->requests[i])
            status = response_refuse(ctx, set->group.ranks[i], &pending->key, error);
    }
    return status;
}

bhvd_status response_send_cache_miss(bhvd_context *ctx, int rank, uint32_t id)
{
    struct bytes out = {0};
    if (ctx->coordinator->requesters[rank].cache_misses >= CACHE_MISS_MAX + ctx->options.cache_capacity)
        return BHVD_ERR_PROTOCOL;           // it does not reply
    bytes_put_u32(&out, id);
    ctx->coordinator->requesters[rank].cache_misses++;
    bhvd_status status = relay_send_to(ctx, rank, FRAME_CACHE_MISS, &out);
    bytes_fini(&out);
    return status;
}
