#include "core/late.h"

#include "base/clock.h"
#include "base/futex.h"
#include "core/context.h"

void late_tell(bhvd_context *ctx, const void *text, size_t size)
{
    if (size >= LATE_TEXT_BYTES)
        size = LATE_TEXT_BYTES - 1;
    pthread_mutex_lock(&ctx->post_lock);
    memcpy(ctx->late.text, text, size);
    ctx->late.text[size] = '\0';
    pthread_mutex_unlock(&ctx->post_lock);
    late_close(ctx);
}

bhvd_status late_take(bhvd_context *ctx, struct link *link, struct bytes_reader payload)
{
    if (link->rank != COORDINATOR)
        return BHVD_ERR_SYSTEM;
    late_tell(ctx, payload.at, (size_t)(payload.end - payload.at));
    return BHVD_OK;
}

void late_close(bhvd_context *ctx)
{
    atomic_fetch_add(&ctx->late.count, 1);
    futex_wake_all(&ctx->late.count);
}

int bhvd_context_wait_late(bhvd_context *ctx, uint32_t *seen, int timeout_ms, char *text, size_t size)
{
    int64_t deadline_ns = clock_deadline_ns(timeout_ms);
    while (!atomic_load(&ctx->closed) && atomic_load(&ctx->late.count) == *seen) {
        if (clock_now_ns() >= deadline_ns)
            return 0;
        futex_wait(&ctx->late.count, *seen, deadline_ns);
    }
    if (atomic_load(&ctx->closed) || size == 0)
        return -1;
    *seen = atomic_load(&ctx->late.count);
    pthread_mutex_lock(&ctx->post_lock);
    size_t used = strnlen(ctx->late.text, size - 1);
    memcpy(text, ctx->late.text, used);
    pthread_mutex_unlock(&ctx->post_lock);
    text[used] = '\0';
    return 1;
}
