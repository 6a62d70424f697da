// Adasum: a sum that does not grow when gradients point the same way (Maleki et al., arXiv:2006.02924).
//
//     A(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b          a factor is 1 where its norm is 0
//
// taken for each tensor by itself, and over n = 2^k ranks recursively: in round d rank r exchanges its vectors with rank r ^ 2^d,
// and both combine them, with the lower rank's as a. So all ranks end bit-equal. Dot products are in double.
// Cost: k N elements each way per rank.
#include <math.h>

#include "collective/collectives.h"

enum { PIECE = 1024 };

struct dots {
    double ab, aa, bb;
};

// Converts up to PIECE elements to double.
static void load(const struct executor *exec, bhvd_dtype dtype, const unsigned char *src, size_t begin, size_t count,
                 double *out)
{
    if (dtype == BHVD_FLOAT64) {
        memcpy(out, src + begin * sizeof(double), count * sizeof(double));
        return;
    }
    float wide[PIECE];
    exec->kernels.to_float[dtype](wide, src + begin * bhvd_dtype_size(dtype), count);
    for (size_t i = 0; i < count; i++)
        out[i] = wide[i];
}

static void store(const struct executor *exec, bhvd_dtype dtype, unsigned char *dst, size_t begin, size_t count,
                  const double *in)
{
    if (dtype == BHVD_FLOAT64) {
        memcpy(dst + begin * sizeof(double), in, count * sizeof(double));
        return;
    }
    float wide[PIECE];
    for (size_t i = 0; i < count; i++)
        wide[i] = (float)in[i];
    exec->kernels.from_float[dtype](dst + begin * bhvd_dtype_size(dtype), wide, count);
}

// Of both vectors times `scale`.
static struct dots dots_of(const struct executor *exec, bhvd_dtype dtype, const unsigned char *a, const unsigned char *b,
                           size_t count, double scale)
{
    double x[PIECE], y[PIECE];
    struct dots dots = {0};
    for (size_t begin = 0; begin < count; begin += PIECE) {
        const size_t n = size_min(count - begin, PIECE);
        load(exec, dtype, a, begin, n, x);
        load(exec, dtype, b, begin, n, y);
        for (size_t i = 0; i < n; i++) {
            const double scaled_x = scale * x[i], scaled_y = scale * y[i];
            dots.ab += scaled_x * scaled_y;
            dots.aa += scaled_x * scaled_x;
            dots.bb += scaled_y * scaled_y;
        }
    }
    return dots;
}

// out = A(a, b); out may be a or b.
static void combine(const struct executor *exec, bhvd_dtype dtype, unsigned char *out, const unsigned char *a,
                    const unsigned char *b, size_t count)
{
    double x[PIECE], y[PIECE];
    struct dots dots = dots_of(exec, dtype, a, b, count, 1);
    // Squares of float64 may leave the range of double. A factor of both vectors cancels out; a power of two rounds nothing.
    const double sum = dots.aa + dots.bb;
    if (!(sum > 0x1p-900 && sum < INFINITY))
        dots = dots_of(exec, dtype, a, b, count, sum > 1 ? 0x1p-600 : 0x1p600);
    double of_a = dots.aa > 0 ? 1 - dots.ab / (2 * dots.aa) : 1;
    double of_b = dots.bb > 0 ? 1 - dots.ab / (2 * dots.bb) : 1;
    for (size_t begin = 0; begin < count; begin += PIECE) {
        const size_t n = size_min(count - begin, PIECE);
        load(exec, dtype, a, begin, n, x);
        load(exec, dtype, b, begin, n, y);
        for (size_t i = 0; i < n; i++)
            x[i] = of_a * x[i] + of_b * y[i];
        store(exec, dtype, out, begin, n, x);
    }
}

struct adasum {
    const struct executor *exec;
    bhvd_dtype dtype;
    const struct span_list *list;
};

// Combines each tensor of the two vectors.
static void combine_vectors(void *arg, const struct step *step, unsigned char *const *buffers)
{
    const struct adasum *x = arg;
    size_t at = 0;
    for (size_t t = 0; t < x->list->count; at += x->list->spans[t++].nbytes)
        combine(x->exec, x->dtype, location_pointer(buffers, step->to) + at, location_pointer(buffers, step->from) + at,
                location_pointer(buffers, step->other) + at, x->list->spans[t].nbytes / bhvd_dtype_size(x->dtype));
}

bhvd_status allreduce_adasum(struct executor *exec, struct group *group, const struct reduction *reduction,
                             const struct span_list *list)
{
    const struct location mine = in_buffer(FUSION_BUFFER, 0), theirs = in_buffer(SCRATCH_BUFFER, 0);
    const struct byte_range all = {0, list->nbytes};
    struct adasum x = {exec, reduction->dtype, list};
    struct plan plan = {0};
    struct schedule *schedule = plan_begin(&plan, group);
    int done = schedule_load(schedule, all, STEP_NONE);
    for (int distance = 1; distance < group->size; distance *= 2) {
        const int peer = group->rank ^ distance, sent = schedule_send(schedule, peer, mine, list->nbytes, done),
                  came = schedule_receive(schedule, peer, theirs, list->nbytes, done);
        const bool lower = !(group->rank & distance);
        done = schedule_reencode(schedule, mine, list->nbytes, lower ? mine : theirs, lower ? theirs : mine, all,
                                 schedule_both(schedule, sent, came));
    }
    schedule_store(schedule, all, schedule_scale(schedule, mine, list->nbytes, done));
    plan.operands = (struct operands){.reduction = *reduction, .list = list, .run_custom_step = combine_vectors, .arg = &x};
    return plan_execute(exec, &plan);
}
