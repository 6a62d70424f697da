/* Op BaguaHvdFact: numbers of the job, read when the graph runs. In an elastic job they may change between runs. */
#include "tensorflow/op_kernel.h"

#include <stdlib.h>
#include <string.h>

struct fact {
    char *name;
    int32_t process_set;
};

/* process_set_included: Horovod's results besides 0 and 1. */
enum { INCLUDED_NOT_INITIALIZED = -1, INCLUDED_UNKNOWN_SET = -3 };

static int included(bhvd_context *context, int process_set)
{
    if (!context)
        return INCLUDED_NOT_INITIALIZED;
    int rank = core.process_set_rank(context, process_set);
    return rank >= 0 ? 1 : rank == -1 ? 0 : INCLUDED_UNKNOWN_SET;
}

static bhvd_status look_up(bhvd_context *context, const struct core_job *job, const char *name, int32_t process_set,
                           int32_t *value)
{
    if (strcmp(name, "process_set_included") == 0) {
        *value = included(context, process_set);
        return BHVD_OK;
    }
    if (!context)
        return BHVD_ERR_UNSUPPORTED;
    if (strcmp(name, "size") == 0)
        *value = core.process_set_size(context, process_set);
    else if (strcmp(name, "process_set_rank") == 0)
        *value = core.process_set_rank(context, process_set);
    else if (strcmp(name, "rank") == 0)
        *value = core.process_set_rank(context, 0);
    else if (strcmp(name, "local_rank") == 0)
        *value = job->local_rank;
    else
        *value = job->local_size;
    return *value < 0 ? BHVD_ERR_ARGUMENT : BHVD_OK;
}

bhvd_status fact_value(const char *name, int32_t process_set, int32_t *value, const char **message)
{
    struct core_job job;
    bhvd_context *context = core_acquire(&job);
    bhvd_status status = look_up(context, &job, name, process_set, value);
    core_release();
    *message = status == BHVD_ERR_UNSUPPORTED ? CORE_NOT_INITIALIZED
        : "Process set provided does not exist, or does not hold this rank.";
    return status;
}

static void *create(TF_OpKernelConstruction *construction)
{
    TF_Status *status = tf.NewStatus();
    struct fact *self = calloc(1, sizeof *self);
    self->name = kernel_string(construction, "fact", status);
    self->process_set = (int32_t)kernel_int(construction, "process_set_id", status);
    kernel_constructed(construction, status);
    return self;
}

static void destroy(void *kernel)
{
    struct fact *self = kernel;
    if (self)
        free(self->name);
    free(self);
}

static void compute(void *kernel, TF_OpKernelContext *ctx)
{
    const struct fact *self = kernel;
    const char *message;
    int32_t value = 0;
    bhvd_status found = fact_value(self->name, self->process_set, &value, &message);
    if (found != BHVD_OK) {
        kernel_fail(ctx, kernel_code(found), message);
        return;
    }
    TF_Status *status = tf.NewStatus();
    TF_Tensor *output = tf.AllocateOutput(ctx, 0, TF_INT32, NULL, 0, sizeof value, status);
    if (!kernel_failed(ctx, status)) {
        *(int32_t *)tf.TensorData(output) = value;
        tf.DeleteTensor(output);
    }
    tf.DeleteStatus(status);
}

bool fact_register(TF_Status *status)
{
    const struct kernel_op op = {
        .name = "BaguaHvdFact", .inputs = NO_STRINGS, .outputs = STRINGS("value: int32"),
        .attributes = STRINGS("fact: {'size', 'rank', 'local_size', 'local_rank', 'process_set_rank', 'process_set_included'}",
                              "process_set_id: int = 0"),
        .shape = kernel_scalar_shape, .create = create, .compute = compute, .destroy = destroy,
    };
    return kernel_register(&op, status);
}
