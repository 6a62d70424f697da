// Adam's arithmetic on tensors in place: one pass over memory, where NumPy would make ten.
#include "kernel/flat.h"
#include "kernel/variants.h"

#define ISA scalar
#include "kernel/adam_loops.h"

void adam_kernels_init(struct adam_kernels *kernels, bhvd_dtype flat, unsigned cpu)
{
    *kernels = adam_kernels_scalar(flat);
    if (cpu & CPU_AVX2)
        adam_kernels_init_avx2(kernels, flat);
}

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
    float scratch[4][FLAT_BLOCK];
    if (!find(&kernels, lists, count, flat))
        return BHVD_ERR_UNSUPPORTED;
    FOR_EACH_FLAT_BLOCK (m, count) {
        const void *ms = flat_load(flat, &m[t], i, n, scratch[0]), *vs = flat_load(flat, &v[t], i, n, scratch[1]),
                   *gs = flat_load(flat, &g[t], i, n, scratch[2]),
                   *xs = x && by[t].weight_decay != 0 ? flat_load(flat, &x[t], i, n, scratch[3]) : NULL;
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
    float scratch[3][FLAT_BLOCK];
    if (!find(&kernels, lists, count, flat))
        return BHVD_ERR_UNSUPPORTED;
    FOR_EACH_FLAT_BLOCK (m, count) {
        const void *vs = flat_load(flat, &v[t], i, n, scratch[0]), *before = flat_load(flat, &x[t], i, n, scratch[1]),
                   *from = (const char *)sent + (at + i) * bhvd_dtype_size(flat);
        void *ms = flat_target(flat, &m[t], i, scratch[2]), *xs = flat_target(flat, &x[t], i, scratch[1]);
        kernels.step(xs, ms, from, vs, before, &by[t], in_steps, n);
        flat_store(&m[t], i, n, ms);
        flat_store(&x[t], i, n, xs);
    }
    return BHVD_OK;
}

bhvd_status bhvd_adam_variance(const struct bhvd_tensor *v, const struct bhvd_tensor *g, const struct bhvd_adam_variance *by,
                               size_t count, bhvd_dtype flat, void *exact, void *own)
{
    struct adam_kernels kernels;
    const struct bhvd_tensor *lists[] = {v, g, NULL};
    float scratch[2][FLAT_BLOCK];
    if (!find(&kernels, lists, count, flat))
        return BHVD_ERR_UNSUPPORTED;
    FOR_EACH_FLAT_BLOCK (v, count) {
        const void *gs = flat_load(flat, &g[t], i, n, scratch[0]);
        const size_t offset = (at + i) * bhvd_dtype_size(flat);
        void *used = flat_target(flat, &v[t], i, scratch[1]);
        kernels.variance(used, (char *)exact + offset, (char *)own + offset, gs, &by[t], n);
        flat_store(&v[t], i, n, used);
    }
    return BHVD_OK;
}
