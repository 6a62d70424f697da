// Tensors seen as one flat vector: packing, unpacking, and Adam's arithmetic in place, in one pass over memory, where NumPy would
// make ten.
#include <stdbool.h>
#include <string.h>

#include "base/dtype.h"
#include "kernel/kernel.h"

enum { BLOCK = 1024 };         // elements that stay in the cache while they are converted

// A tensor's elements i ... i + n - 1 in the flat dtype: in place, or converted into `scratch`.
static const void *load(bhvd_dtype flat, const struct bhvd_tensor *tensor, size_t i, size_t n, void *scratch)
{
    const char *from = (const char *)tensor->src + i * bhvd_dtype_size((bhvd_dtype)tensor->dtype);
    if (tensor->dtype == (int32_t)flat)
        return from;
    kernel_table_best()->to_float[tensor->dtype](scratch, from, n);
    return scratch;
}

// Where to compute these elements: in place, or in `scratch` if store has to convert them.
static void *target(bhvd_dtype flat, const struct bhvd_tensor *tensor, size_t i, void *scratch)
{
    const bool same = tensor->dtype == (int32_t)flat;
    return same ? (char *)tensor->dst + i * bhvd_dtype_size((bhvd_dtype)tensor->dtype) : scratch;
}

static void store(const struct bhvd_tensor *tensor, size_t i, size_t n, const void *from)
{
    void *to = (char *)tensor->dst + i * bhvd_dtype_size((bhvd_dtype)tensor->dtype);
    if (from != to)
        kernel_table_best()->from_float[tensor->dtype](to, from, n);
}

// Iterates over every block of every tensor: tensor `t`, its elements i ... i + n - 1; the tensor begins at `at` in a flat vector.
#define FOR_EACH_BLOCK(tensors, count)                                                                   \
    for (size_t t = 0, at = 0, of; t < (count) && (of = tensor_elements(&(tensors)[t], 0), true); at += of, t++) \
        for (size_t i = 0, n; i < of && (n = of - i < BLOCK ? of - i : BLOCK); i += n)

// Whether a vector of this dtype can hold the values of these tensors.
static bool is_possible(const struct bhvd_tensor *tensors, size_t count, bhvd_dtype flat)
{
    for (size_t t = 0; t < count; t++) {
        if (!dtype_is_valid(tensors[t].dtype) || (tensors[t].dtype != (int32_t)flat &&
                                                  (flat != BHVD_FLOAT32 || !dtype_is_floating(tensors[t].dtype))))
            return false;
    }
    return true;
}

bhvd_status bhvd_pack(const struct bhvd_tensor *tensors, size_t count, bhvd_dtype flat, void *dst)
{
    unsigned char *to = dst;
    if (!is_possible(tensors, count, flat))
        return BHVD_ERR_UNSUPPORTED;
    for (size_t t = 0; t < count; t++) {
        const size_t n = tensor_elements(&tensors[t], 0), nbytes = n * bhvd_dtype_size(flat);
        if (n && tensors[t].dtype == (int32_t)flat)
            memcpy(to, tensors[t].src, nbytes);
        else if (n)
            kernel_table_best()->to_float[tensors[t].dtype]((float *)to, tensors[t].src, n);
        to += nbytes;
    }
    return BHVD_OK;
}

bhvd_status bhvd_unpack(const struct bhvd_tensor *tensors, size_t count, bhvd_dtype flat, const void *src)
{
    const unsigned char *from = src;
    if (!is_possible(tensors, count, flat))
        return BHVD_ERR_UNSUPPORTED;
    for (size_t t = 0; t < count; t++) {
        const size_t n = tensor_elements(&tensors[t], 0), nbytes = n * bhvd_dtype_size(flat);
        if (n && tensors[t].dtype == (int32_t)flat)
            memcpy(tensors[t].dst, from, nbytes);
        else if (n)
            kernel_table_best()->from_float[tensors[t].dtype](tensors[t].dst, (const float *)from, n);
        from += nbytes;
    }
    return BHVD_OK;
}

bhvd_status bhvd_unpack_add(const struct bhvd_tensor *tensors, size_t count, bhvd_dtype flat, const void *src)
{
    float scratch[BLOCK];
    if (!is_possible(tensors, count, flat) || !dtype_is_floating((int32_t)flat))
        return BHVD_ERR_UNSUPPORTED;
    FOR_EACH_BLOCK (tensors, count) {
        const void *x = load(flat, &tensors[t], i, n, scratch);
        void *sum = target(flat, &tensors[t], i, scratch);
        kernel_table_best()->reduce[KERNEL_SUM][flat](sum, x, (const char *)src + (at + i) * bhvd_dtype_size(flat), n);
        store(&tensors[t], i, n, sum);
    }
    return BHVD_OK;
}

// --------------------------------------------------------------------------------------------------------------- Adam

// lists: of tensors, up to NULL. NULL: the dtypes are not supported.
static const struct kernel_adam *find_adam(const struct bhvd_tensor *const *lists, size_t count, bhvd_dtype flat)
{
    if (flat != BHVD_FLOAT32 && flat != BHVD_FLOAT64)
        return NULL;
    for (; *lists; lists++)
        if (!is_possible(*lists, count, flat))
            return NULL;
    return &kernel_table_best()->adam[flat];
}

bhvd_status bhvd_adam_momentum(const struct bhvd_tensor *m, const struct bhvd_tensor *v, const struct bhvd_tensor *g,
                               const struct bhvd_tensor *x, const struct bhvd_adam *by, size_t count, int in_steps,
                               bhvd_dtype flat, void *sent)
{
    const struct bhvd_tensor *lists[] = {m, v, g, x, NULL};
    const struct kernel_adam *kernels = find_adam(lists, count, flat);
    float scratch[4][BLOCK];
    if (!kernels)
        return BHVD_ERR_UNSUPPORTED;
    FOR_EACH_BLOCK (m, count) {
        const void *ms = load(flat, &m[t], i, n, scratch[0]), *vs = load(flat, &v[t], i, n, scratch[1]),
                   *gs = load(flat, &g[t], i, n, scratch[2]),
                   *xs = x && by[t].weight_decay != 0 ? load(flat, &x[t], i, n, scratch[3]) : NULL;
        void *to = (char *)sent + (at + i) * bhvd_dtype_size(flat);
        kernels->momentum(to, ms, gs, vs, xs, &by[t], in_steps, n);
    }
    return BHVD_OK;
}

bhvd_status bhvd_adam_step(const struct bhvd_tensor *m, const struct bhvd_tensor *v, const struct bhvd_tensor *x,
                           const struct bhvd_adam *by, size_t count, int in_steps, bhvd_dtype flat, const void *sent)
{
    const struct bhvd_tensor *lists[] = {m, v, x, NULL};
    const struct kernel_adam *kernels = find_adam(lists, count, flat);
    float scratch[3][BLOCK];
    if (!kernels)
        return BHVD_ERR_UNSUPPORTED;
    FOR_EACH_BLOCK (m, count) {
        const void *vs = load(flat, &v[t], i, n, scratch[0]), *before = load(flat, &x[t], i, n, scratch[1]),
                   *from = (const char *)sent + (at + i) * bhvd_dtype_size(flat);
        void *ms = target(flat, &m[t], i, scratch[2]), *xs = target(flat, &x[t], i, scratch[1]);
        kernels->step(xs, ms, from, vs, before, &by[t], in_steps, n);
        store(&m[t], i, n, ms);
        store(&x[t], i, n, xs);
    }
    return BHVD_OK;
}

bhvd_status bhvd_adam_variance(const struct bhvd_tensor *v, const struct bhvd_tensor *g, const struct bhvd_adam_variance *by,
                               size_t count, bhvd_dtype flat, void *exact, void *own)
{
    const struct bhvd_tensor *lists[] = {v, g, NULL};
    const struct kernel_adam *kernels = find_adam(lists, count, flat);
    float scratch[2][BLOCK];
    if (!kernels)
        return BHVD_ERR_UNSUPPORTED;
    FOR_EACH_BLOCK (v, count) {
        const void *gs = load(flat, &g[t], i, n, scratch[0]);
        const size_t offset = (at + i) * bhvd_dtype_size(flat);
        void *used = target(flat, &v[t], i, scratch[1]);
        kernels->variance(used, (char *)exact + offset, (char *)own + offset, gs, &by[t], n);
        store(&v[t], i, n, used);
    }
    return BHVD_OK;
}
