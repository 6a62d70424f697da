// Adam's arithmetic on tensors in place: one pass over memory, where NumPy would make ten.
#include "kernel/flat.h"
#include "kernel/variants.h"

#define ISA scalar
#include "kernel/adam_loops.h"

enum { BLOCK = 1024 };      // elements that stay in the cache while they are converted

void adam_kernels_init(struct adam_kernels *kernels, bhvd_dtype flat, unsigned cpu)
{
    *kernels = adam_kernels_scalar(flat);
    if (cpu & CPU_AVX2)
        adam_kernels_init_avx2(kernels, flat);
}

// A tensor's elements i ... i + n - 1 in the flat dtype: in place, or converted into `scratch`.
static const void *load(bhvd_dtype flat, const struct bhvd_tensor *tensor, size_t i, size_t n, void *scratch)
{
    const char *from = (const char *)tensor->src + i * bhvd_dtype_size((bhvd_dtype)tensor->dtype);
    if (tensor->dtype == (int32_t)flat)
        return from;
    kernel_table_best()->to_float[tensor->dtype](scratch, from, n);
    return scratch;
}

// Where to compute these elements: in place, or in `scratch` if store() has to convert them.
static void *place(bhvd_dtype flat, const struct bhvd_tensor *tensor, size_t i, void *scratch)
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
#define FOR_EACH_BLOCK(tensors, count)                                                                        \
    for (size_t t = 0, at = 0, of; t < (count) && (of = flat_count(&(tensors)[t]), true); at += of, t++)      \
        for (size_t i = 0, n; i < of && (n = of - i < BLOCK ? of - i : BLOCK); i += n)

static bool find(struct adam_kernels *kernels, const struct bhvd_tensor *const *lists, size_t count,
                 bhvd_dtype flat)
{
    if (flat != BHVD_FLOAT32 && flat != BHVD_FLOAT64)
        return false;
    for (; *lists; lists++)
        if (!flat_is_possible(*lists, count, flat))
            return false;
    adam_kernels_init(kernels, flat, cpu_features());
    return true;
}

bhvd_status bhvd_adam_momentum(const struct bhvd_tensor *m, const struct bhvd_tensor *v, const struct bhvd_tensor *g,
                               const struct bhvd_tensor *x, const struct bhvd_adam *by, size_t count, int in_steps,
                               bhvd_dtype flat, void *sent)
{
    struct adam_kernels kernels;
    const struct bhvd_tensor *lists[] = {m, v, g, x, NULL};
    float scratch[4][BLOCK];
    if (!find(&kernels, lists, count, flat))
        return BHVD_ERR_UNSUPPORTED;
    FOR_EACH_BLOCK (m, count) {
        const void *ms = load(flat, &m[t], i, n, scratch[0]), *vs = load(flat, &v[t], i, n, scratch[1]),
                   *gs = load(flat, &g[t], i, n, scratch[2]),
                   *xs = x && by[t].weight_decay != 0 ? load(flat, &x[t], i, n, scratch[3]) : NULL;
        void *to = (char *)sent + (at + i) * bhvd_dtype_size(flat);
        kernels.momentum(to, ms, gs, vs, xs, &by[t], in_steps, n);
    }
    return BHVD_OK;
}

bhvd_status bhvd_adam_step(const struct bhvd_tensor *m, const struct bhvd_tensor *v, const struct bhvd_tensor *x,
                           const struct bhvd_adam *by, size_t count, int in_steps, bhvd_dtype flat, const void *sent)
{
    struct adam_kernels kernels;
    const struct bhvd_tensor *lists[] = {m, v, x, NULL};
    float scratch[3][BLOCK];
    if (!find(&kernels, lists, count, flat))
        return BHVD_ERR_UNSUPPORTED;
    FOR_EACH_BLOCK (m, count) {
        const void *vs = load(flat, &v[t], i, n, scratch[0]), *before = load(flat, &x[t], i, n, scratch[1]),
                   *from = (const char *)sent + (at + i) * bhvd_dtype_size(flat);
        void *ms = place(flat, &m[t], i, scratch[2]), *xs = place(flat, &x[t], i, scratch[1]);
        kernels.step(xs, ms, from, vs, before, &by[t], in_steps, n);
        store(&m[t], i, n, ms);
        store(&x[t], i, n, xs);
    }
    return BHVD_OK;
}

bhvd_status bhvd_adam_variance(const struct bhvd_tensor *v, const struct bhvd_tensor *g, const struct bhvd_adam_variance *by,
                               size_t count, bhvd_dtype flat, void *exact, void *own)
{
    struct adam_kernels kernels;
    const struct bhvd_tensor *lists[] = {v, g, NULL};
    float scratch[2][BLOCK];
    if (!find(&kernels, lists, count, flat))
        return BHVD_ERR_UNSUPPORTED;
    FOR_EACH_BLOCK (v, count) {
        const void *gs = load(flat, &g[t], i, n, scratch[0]);
        const size_t offset = (at + i) * bhvd_dtype_size(flat);
        void *used = place(flat, &v[t], i, scratch[1]);
        kernels.variance(used, (char *)exact + offset, (char *)own + offset, gs, &by[t], n);
        store(&v[t], i, n, used);
    }
    return BHVD_OK;
}
