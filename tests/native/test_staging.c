// Operations on tensors of a device (native/gpu/staging.c), also under the sanitizers. Host memory is the device (host_device.h):
// results are copied back, buffers are reused, and operations that are dropped early leave nothing behind.
#include "device/buffer.h"
#include "host_device.h"
#include "job.h"

enum { COUNT = 3000, STEPS = 12 };

static bhvd_device *device;

static void check_step(bhvd_context *ctx, int rank, int step, bool waits)
{
    static float memory[RANKS][STEPS][2][COUNT];
    float *x = memory[rank][step][0], *y = memory[rank][step][1];
    const int64_t shape[] = {COUNT};
    char name[32];
    snprintf(name, sizeof name, "step.%d", step);
    for (int i = 0; i < COUNT; i++)
        x[i] = y[i] = (float)(rank + step);
    const struct bhvd_tensor tensors[] = {{.src = x, .dst = x, .shape = shape, .ndim = 1, .dtype = BHVD_FLOAT32},
                                          {.src = y, .dst = y, .shape = shape, .ndim = 1, .dtype = BHVD_FLOAT32}};
    const struct bhvd_args args = {
        .kind = BHVD_ALLREDUCE, .name = name, .tensors = tensors, .tensor_count = 2, .op = BHVD_OP_SUM,
        .prescale_factor = 1.0, .postscale_factor = 1.0, .device = 0, .gpu = device};
    struct bhvd_error error;
    bhvd_handle *handle;
    CHECK_STATUS(bhvd_post(ctx, &args, &handle, &error), BHVD_OK);
    if (waits) {
        CHECK_STATUS(bhvd_wait(handle, -1, &error), BHVD_OK);
        CHECK_STATUS(bhvd_handle_join(handle, NULL, &error), BHVD_OK);
        for (int i = 0; i < COUNT; i++) {
            CHECK(x[i] == (float)(RANKS * (RANKS - 1) / 2 + RANKS * step));
            CHECK(y[i] == x[i]);
        }
    }
    bhvd_handle_drop(handle);
}

static void run_steps(struct job *job, int rank, bhvd_context *ctx)
{
    (void)job;
    for (int step = 0; step < STEPS; step++)
        check_step(ctx, rank, step, step % 4 != 3);
    const struct bhvd_args args = {.kind = BHVD_BARRIER, .name = "end", .device = 3};
    struct bhvd_error error;
    bhvd_handle *handle;
    finish(post_floats(ctx, (struct bhvd_args){.kind = BHVD_BARRIER, .name = "end", .blocking = 1}, NULL, NULL, -1), BHVD_OK);
    CHECK_STATUS(bhvd_post(ctx, &args, &handle, &error), BHVD_ERR_ARGUMENT);
    CHECK_STR_CONTAINS(error.message, "'end' is on device 3, but was given no GPU");
}

TEST(what_is_staged_comes_back)
{
    device = host_device_create();
    on_every_path(run_steps);
    bhvd_device_drop(device);
}

TEST(copies_wait_for_the_device)
{
    const int64_t shape[] = {2, 3};
    int32_t from[6] = {1, 2, 3, 4, 5, 6}, to[6] = {0};
    struct bhvd_error error;
    device = host_device_create();
    const struct bhvd_tensor tensor = {.src = from, .dst = to, .shape = shape, .ndim = 2, .dtype = BHVD_INT32};
    CHECK_STATUS(bhvd_device_copy(device, &tensor, 1, NULL, &error), BHVD_OK);
    CHECK_MEM_EQ(to, from, sizeof to);
    CHECK_STATUS(bhvd_device_set_kernel(device, BHVD_DEVICE_KERNEL_COUNT, 0, NULL), BHVD_ERR_ARGUMENT);
    bhvd_device_drop(device);
}

static int out_of_memory(struct bhvd_device *self, enum device_memory memory, size_t nbytes, void **out)
{
    (void)self, (void)memory, (void)nbytes, (void)out;
    return DEVICE_NO_MEMORY;
}

TEST(a_buffer_that_cannot_be_had_is_null)
{
    struct device_buffer *buffer;
    device = host_device_create();
    const struct device_ops *const ops = device->ops;
    struct device_ops failing = *ops;
    failing.memory_allocate = out_of_memory;
    device->ops = &failing;
    CHECK_EQ(device_buffer_acquire(device, MEMORY_DEVICE, 1, &buffer), DEVICE_NO_MEMORY);
    CHECK(!buffer);
    device->ops = ops;
    bhvd_device_drop(device);
}

TEST(what_is_missing_is_named)
{
    struct bhvd_error error;
    int version, count;
    if (bhvd_cuda_probe("/nowhere/libcuda.so.1", &version, &count, &error))
        CHECK_STR_CONTAINS(error.message, "libcuda.so.1");
    if (bhvd_nccl_probe("/nowhere/libnccl.so.2", &version, &error))
        CHECK_STR_CONTAINS(error.message, "install the package nvidia-nccl-cu12");
}
