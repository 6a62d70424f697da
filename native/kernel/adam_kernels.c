// Adam with communicated momentum, and Adam's variance among relaxed steps: bhvd_adam_momentum, bhvd_adam_step and
// bhvd_adam_variance (bagua_hvd.h) on elements of one dtype. All instruction sets give the same bits. A NaN passes through BOUNDED.
#include "kernel/loops.h"

#define BOUNDED(x, longest) ((x) < -(longest) ? -(longest) : (x) > (longest) ? (longest) : (x))

// Conditions are constants, so that the compiler makes a vectorized loop for each combination.
#define ADAM_LOOPS(real, element, root)                                                                                      \
    INLINE void NAME(momentum_loop_##element)(any_##element *sent, const any_##element *m, const any_##element *g,           \
                                              const any_##element *v, const any_##element *x, const struct bhvd_adam *by,    \
                                              bool decays, bool in_steps, size_t count)                                      \
    {                                                                                                                        \
        const real beta1 = (real)by->beta1, fresh = (real)(1 - by->beta1), decay = (real)by->weight_decay,                   \
                   correction = (real)by->correction, eps = (real)by->eps, longest = (real)by->longest;                      \
        INDEPENDENT for (size_t i = 0; i < count; i++) {                                                                     \
            const real p = root(v[i]) / correction + eps, gradient = decays ? g[i] + decay * x[i] : g[i],                    \
                       moved = beta1 * m[i] + fresh * gradient, known = v[i] == 0 ? 0 : moved, bound = longest * p,          \
                       bounded = BOUNDED(known, bound);                                                                      \
            sent[i] = in_steps ? bounded / p : bounded;                                                                      \
        }                                                                                                                    \
    }                                                                                                                        \
    static void NAME(momentum_##element)(void *sent, const void *m, const void *g, const void *v, const void *x,             \
                                         const struct bhvd_adam *by, bool in_steps, size_t count)                            \
    {                                                                                                                        \
        if (x && in_steps)                                                                                                   \
            NAME(momentum_loop_##element)(sent, m, g, v, x, by, true, true, count);                                          \
        else if (x)                                                                                                          \
            NAME(momentum_loop_##element)(sent, m, g, v, x, by, true, false, count);                                         \
        else if (in_steps)                                                                                                   \
            NAME(momentum_loop_##element)(sent, m, g, v, m, by, false, true, count);                                         \
        else                                                                                                                 \
            NAME(momentum_loop_##element)(sent, m, g, v, m, by, false, false, count);                                        \
    }                                                                                                                        \
    INLINE void NAME(step_loop_##element)(any_##element *x, any_##element *m, const any_##element *sent,                     \
                                          const any_##element *v, const any_##element *before,                               \
                                          const struct bhvd_adam *by, bool in_steps, size_t count)                           \
    {                                                                                                                        \
        const real correction = (real)by->correction, eps = (real)by->eps, longest = (real)by->longest,                      \
                   rate = (real)by->rate, decay = (real)by->decay;                                                           \
        INDEPENDENT for (size_t i = 0; i < count; i++) {                                                                     \
            const real p = root(v[i]) / correction + eps, received = in_steps ? sent[i] * p : sent[i],                       \
                       known = v[i] == 0 ? 0 : received, bound = longest * p, bounded = BOUNDED(known, bound);               \
            m[i] = bounded;                                                                                                  \
            x[i] = before[i] - (rate * bounded / p + decay * before[i]);                                                     \
        }                                                                                                                    \
    }                                                                                                                        \
    static void NAME(step_##element)(void *x, void *m, const void *sent, const void *v, const void *before,                  \
                                     const struct bhvd_adam *by, bool in_steps, size_t count)                                \
    {                                                                                                                        \
        if (in_steps)                                                                                                        \
            NAME(step_loop_##element)(x, m, sent, v, before, by, true, count);                                               \
        else                                                                                                                 \
            NAME(step_loop_##element)(x, m, sent, v, before, by, false, count);                                              \
    }                                                                                                                        \
    static void NAME(variance_##element)(void *of_optimizer, void *of_all, void *of_mine, const void *gradients,             \
                                         const struct bhvd_adam_variance *by, size_t count)                                  \
    {                                                                                                                        \
        any_##element *used = of_optimizer, *exact = of_all, *own = of_mine;                                                 \
        const any_##element *g = gradients;                                                                                  \
        const real exact_rate = (real)by->exact_rate, own_rate = (real)by->own_rate, ranks = (real)by->ranks,                \
                   correction = (real)by->correction, fresh = (real)(1 - by->beta2), beta2 = (real)by->beta2;                \
        INDEPENDENT for (size_t i = 0; i < count; i++) {                                                                     \
            const real square = g[i] * g[i], moved = exact[i] + exact_rate * (square - exact[i]),                            \
                       v = exact_rate > 0 ? moved : exact[i], w = own[i] + own_rate * (square - own[i]), least = w / ranks,  \
                       above = v >= least ? v : least, within = above <= w ? above : w,                                      \
                       rest = correction * within - fresh * square;                                                          \
            exact[i] = v;                                                                                                    \
            own[i] = w;                                                                                                      \
            used[i] = (rest < 0 ? 0 : rest) / beta2;                                                                         \
        }                                                                                                                    \
    }
ADAM_LOOPS(float, f32, sqrtf)
ADAM_LOOPS(double, f64, sqrt)

void NAME(adam_kernels_init)(struct kernel_table *table)
{
    table->adam[BHVD_FLOAT32] = (struct kernel_adam){NAME(momentum_f32), NAME(step_f32), NAME(variance_f32)};
    table->adam[BHVD_FLOAT64] = (struct kernel_adam){NAME(momentum_f64), NAME(step_f64), NAME(variance_f64)};
}
