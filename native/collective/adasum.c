// Adasum: a sum that does not grow when gradients point the same way (Maleki et al., arXiv:2006.02924).
//
//     A(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b          a factor is 1 where its norm is 0
//
// taken for each tensor by itself, and over n = 2^k ranks recursively: in round d rank r exchanges its vectors with rank
// r ^ 2^d, and both combine them, the lower rank's as a. So all ranks end bit-equal. Dot products in double.
// Wire: k N elements each way per rank.
#include <stdlib.h>

#include "collective/collective.h"

enum { PIECE = 1024 };

struct dots {
    double ab, aa, bb;
};

// Reads up to PIECE elements as double.
static void load(const struct executor_context *run, bhvd_dtype dtype, const unsigned char *src, size_t begin, size_t count,
                 double *out)
{
    if (dtype == BHVD_FLOAT64) {
        memcpy(out, src + begin * sizeof(double), count * sizeof(double));
        return;
    }
    float wide[PIECE];
    run->kernels.to_float[dtype](wide, src + begin * bhvd_dtype_size(dtype), count);
    for (size_t i = 0; i < count; i++)
        out[i] = wide[i];
}

static void store(const struct executor_context *run, bhvd_dtype dtype, unsigned char *dst, size_t begin, size_t count,
                  const double *in)
{
    if (dtype == BHVD_FLOAT64) {
        memcpy(dst + begin * sizeof(double), in, count * sizeof(double));
        return;
    }
    float wide[PIECE];
    for (size_t i = 0; i < count; i++)
        wide[i] = (float)in[i];
    run->kernels.from_float[dtype](dst + begin * bhvd_dtype_size(dtype), wide, count);
}

static size_t piece_at(size_t begin, size_t count) { return count - begin < PIECE ? count - begin : PIECE; }

// out = A(a, b); out may be a or b.
static void combine(const struct executor_context *run, bhvd_dtype dtype, unsigned char *out, const unsigned char *a,
                    const unsigned char *b, size_t count)
{
    double x[PIECE], y[PIECE];
    struct dots dots = {0};
    for (size_t begin = 0; begin < count; begin += PIECE) {
        size_t n = piece_at(begin, count);
        load(run, dtype, a, begin, n, x);
        load(run, dtype, b, begin, n, y);
        for (size_t i = 0; i < n; i++) {
            dots.ab += x[i] * y[i];
            dots.aa += x[i] * x[i];
            dots.bb += y[i] * y[i];
        }
    }
    double of_a = dots.aa > 0 ? 1 - dots.ab / (2 * dots.aa) : 1;
    double of_b = dots.bb > 0 ? 1 - dots.ab / (2 * dots.bb) : 1;
    for (size_t begin = 0; begin < count; begin += PIECE) {
        size_t n = piece_at(begin, count);
        load(run, dtype, a, begin, n, x);
        load(run, dtype, b, begin, n, y);
        for (size_t i = 0; i < n; i++)
            x[i] = of_a * x[i] + of_b * y[i];
        store(run, dtype, out, begin, n, x);
    }
}

bhvd_status allreduce_adasum(struct executor_context *run, struct group *group, const struct reduction *reduction,
                             const struct span_list *list)
{
    const size_t element = bhvd_dtype_size(reduction->dtype);
    unsigned char *mine = fusion_acquire(&run->fusion, 0, list->nbytes), *theirs = fusion_acquire(&run->fusion, 1, list->nbytes);
    if (!mine || !theirs)
        return run_fail(run, BHVD_ERR_SYSTEM, "no memory for a fusion buffer of %zu bytes", list->nbytes);
    struct span_cursor in = span_cursor_at(list, 0), out = span_cursor_at(list, 0);
    span_pack(&in, mine, list->nbytes);
    if (reduction->prescale != 1.0)
        reduction->scale(mine, mine, reduction->prescale, list->nbytes / element);
    bhvd_status status = BHVD_OK;
    for (int distance = 1; distance < group->size && !status; distance *= 2) {
        struct transfer transfers[2];
        group_send(run, group, group->rank ^ distance, &transfers[0], mine, list->nbytes);
        group_receive(run, group, group->rank ^ distance, &transfers[1], theirs, list->nbytes);
        status = run_transfers(run, transfers, 2);
        bool lower = !(group->rank & distance);
        size_t offset = 0;
        for (size_t t = 0; t < list->count && !status; offset += list->spans[t++].nbytes)
            combine(run, reduction->dtype, mine + offset, (lower ? mine : theirs) + offset,
                    (lower ? theirs : mine) + offset, list->spans[t].nbytes / element);
    }
    if (status)
        return status;
    if (reduction->postscale != 1.0)
        reduction->scale(mine, mine, reduction->postscale, list->nbytes / element);
    span_unpack(&out, mine, list->nbytes);
    return BHVD_OK;
}
