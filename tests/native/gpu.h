// A GPU for every rank of a job (job.h): fakes of the driver and of NCCL, tests/device/fake_cuda.c and fake_nccl.c, in a
// library beside the program. No real GPU is used.
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include "job.h"

// As in fake_cuda.c: marks an address of host memory as one of the device.
#define GPU_TAG ((uintptr_t)1 << 62)

struct gpu {
    bhvd_device *device;
    void *stream;               // the framework's stream
};

static struct gpu gpus[RANKS];

static struct {
    char path[4096];
    void *handle;                       // of dlopen()
    int (*init)(unsigned flags);
    int (*stream_create)(void **stream, unsigned flags);
    int (*stream_synchronize)(void *stream);
    int (*stream_destroy)(void *stream);
    int (*retain)(void **context, int device);
    int (*push)(void *context);
    int (*pop)(void **context);
    void *(*kernel)(const void *function);
    int (*nccl_groups)(void);
} driver;

static void *gpu_at(const void *memory) { return (void *)((uintptr_t)memory | GPU_TAG); }

static void *gpu_function(const char *name)
{
    void *function = dlsym(driver.handle, name);
    CHECK(function);
    return function;
}

static void gpu_load(void)
{
    if (driver.handle)
        return;
    ssize_t length = readlink("/proc/self/exe", driver.path, sizeof driver.path - 32);
    CHECK(length > 0);
    driver.path[length] = 0;
    strcpy(strrchr(driver.path, '/'), "/fake_cuda.so");
    driver.handle = dlopen(driver.path, RTLD_NOW | RTLD_LOCAL);
    if (!driver.handle)
        check_fail(__FILE__, __LINE__, "%s", dlerror());
    *(void **)&driver.init = gpu_function("cuInit");
    *(void **)&driver.stream_create = gpu_function("cuStreamCreate");
    *(void **)&driver.stream_synchronize = gpu_function("cuStreamSynchronize");
    *(void **)&driver.stream_destroy = gpu_function("cuStreamDestroy_v2");
    *(void **)&driver.retain = gpu_function("cuDevicePrimaryCtxRetain");
    *(void **)&driver.push = gpu_function("cuCtxPushCurrent_v2");
    *(void **)&driver.pop = gpu_function("cuCtxPopCurrent_v2");
    *(void **)&driver.kernel = gpu_function("fake_cuda_kernel");
    *(void **)&driver.nccl_groups = gpu_function("fake_nccl_groups");
    CHECK_EQ(driver.init(0), 0);
}

// gpu_enter() and gpu_leave() push and pop the context of the rank's GPU.
static void gpu_enter(int rank)
{
    void *context;
    CHECK_EQ(driver.retain(&context, rank), 0);
    CHECK_EQ(driver.push(context), 0);
}

static void gpu_leave(void)
{
    void *context;
    CHECK_EQ(driver.pop(&context), 0);
}

// dst = factor * src, as scale_f32 in tests/device/kernels.cu.
static int scale_f32(unsigned blocks, unsigned threads, void **params, int (*reaches)(uint64_t address, size_t nbytes))
{
    float *dst = (float *)(*(uintptr_t *)params[0] & ~GPU_TAG);
    const float *src = (const float *)(*(uintptr_t *)params[1] & ~GPU_TAG);
    const double factor = *(double *)params[2];
    const uint64_t count = *(uint64_t *)params[3];
    (void)blocks, (void)threads, (void)reaches;
    for (uint64_t i = 0; i < count; i++)
        dst[i] = src[i] * (float)factor;
    return 0;
}

// struct fake_function of fake_cuda.c. The tests scale only float32.
static struct {
    int (*run)(unsigned blocks, unsigned threads, void **params, int (*reaches)(uint64_t address, size_t nbytes));
    int param_count;
} scale_function = {scale_f32, 4};

static void gpu_open_all(void)
{
    gpu_load();
    for (int rank = 0; rank < RANKS; rank++) {
        struct bhvd_device_options options = {.index = rank, .libraries = driver.path,
                                              .nccl_libraries = driver.path};
        struct bhvd_error error;
        CHECK_STATUS(bhvd_device_create(&options, &gpus[rank].device, &error), BHVD_OK);
        gpu_enter(rank);
        for (int type = 0; type < 4; type++)
            CHECK_STATUS(bhvd_device_set_kernel(gpus[rank].device, BHVD_DEVICE_SCALE, type, driver.kernel(&scale_function)), BHVD_OK);
        CHECK_EQ(driver.stream_create(&gpus[rank].stream, 0), 0);
        gpu_leave();
    }
}

static void gpu_close_all(void)
{
    for (int rank = 0; rank < RANKS; rank++) {
        bhvd_device_drop(gpus[rank].device);
        CHECK_EQ(driver.stream_destroy(gpus[rank].stream), 0);
    }
}

// Like run_this_job, with a GPU opened for every rank.
static void run_on_gpus(struct job job)
{
    gpu_open_all();
    run_this_job(&job);
    gpu_close_all();
}
