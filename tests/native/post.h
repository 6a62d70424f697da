// Operations on floats, for tests.
#pragma once

#include "bagua_hvd.h"
#include "check.h"

// Posts an operation on `count` floats; negative: without a tensor. Factors that are 0 become 1.
__attribute__((unused))
static bhvd_handle *post_floats(bhvd_context *ctx, struct bhvd_args args, const float *src, float *dst, int64_t count)
{
    const struct bhvd_tensor tensor = {.src = src, .dst = dst, .shape = &count, .ndim = 1, .dtype = BHVD_FLOAT32};
    struct bhvd_error error;
    bhvd_handle *handle;
    args.tensors = &tensor;
    args.tensor_count = count >= 0;
    args.prescale_factor = args.prescale_factor != 0 ? args.prescale_factor : 1;
    args.postscale_factor = args.postscale_factor != 0 ? args.postscale_factor : 1;
    args.device = -1;
    CHECK_STATUS(bhvd_post(ctx, &args, &handle, &error), BHVD_OK);
    return handle;
}

__attribute__((unused))
static bhvd_handle *post_sum(bhvd_context *ctx, const char *name, float *values, int64_t count)
{
    return post_floats(ctx, (struct bhvd_args){.kind = BHVD_ALLREDUCE, .name = name, .op = BHVD_OP_SUM}, values, values, count);
}

__attribute__((unused))
static bhvd_handle *post_barrier(bhvd_context *ctx, const char *name)
{
    return post_floats(ctx, (struct bhvd_args){.kind = BHVD_BARRIER, .name = name}, NULL, NULL, -1);
}

__attribute__((unused))
static void finish(bhvd_handle *handle, bhvd_status expected)
{
    struct bhvd_error error;
    CHECK_STATUS(bhvd_wait(handle, -1, &error), expected);
    bhvd_handle_drop(handle);
}
