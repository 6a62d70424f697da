"""Local steps against the equations: local_sgd, post-local SGD, diloco."""
import itertools

import numpy as np
import pytest

import bagua_hvd.torch as hvd
from bagua_hvd.algorithms import DiLoCo, LocalSGD
from workers import BUCKETS, SGD, F, assert_trains_as, gradient


def local_sgd(interval, warmup):
    """Averaged gradients for `warmup` steps; then x_i <- x_i - step(g_i), and after every interval-th the mean."""
    def simulate(n, places, xs):
        optimizers = [SGD() for _ in range(n)]
        for t in itertools.count():
            gs = [gradient(i, t, x.astype(F)) for i, x in enumerate(xs)]
            if t < warmup:
                gs = [np.mean(gs, 0, np.float64)] * n
            xs = [optimizers[i](x, g) for i, (x, g) in enumerate(zip(xs, gs, strict=True))]
            if t >= warmup and (t - warmup + 1) % interval == 0:
                xs = [np.mean(xs, 0, np.float64)] * n
            yield xs
    return simulate


def diloco(interval, eta, mu, warmup=0):
    """Averaged gradients for `warmup` steps. Then every interval steps Delta = mean_i(theta - x_i); m = mu m + Delta;
    theta -= eta (Delta + mu m); x_i = theta.
    """
    def simulate(n, places, xs):
        optimizers = [SGD() for _ in range(n)]
        m = 0
        for t in itertools.count():
            gs = [gradient(i, t, x.astype(F)) for i, x in enumerate(xs)]
            if t < warmup:
                gs = [np.mean(gs, 0, np.float64)] * n
            if t == warmup:
                theta = np.mean(xs, 0, np.float64)
            xs = [optimizers[i](x, g) for i, (x, g) in enumerate(zip(xs, gs, strict=True))]
            if t >= warmup and (t - warmup + 1) % interval == 0:
                delta = theta - np.mean(xs, 0, np.float64)
                m = mu * m + delta
                theta = theta - eta * (delta + mu * m)
                xs = [theta] * n
            yield xs
    return simulate


def all_cases():
    hvd.init()
    for interval, warmup in ((1, 0), (4, 0), (3, 4)):
        algorithm = LocalSGD(communication_interval=interval, warmup_steps=warmup)
        assert_trains_as(algorithm, local_sgd(interval, warmup), apart=warmup == 0, exact=False)
    for interval, eta, mu, warmup in ((1, 0.7, 0.9, 0), (3, 0.7, 0.9, 0), (3, 1.0, 0.0, 0), (2, 0.7, 0.9, 5)):
        algorithm = DiLoCo(interval, outer_lr=eta, outer_momentum=mu, warmup_steps=warmup)
        assert_trains_as(algorithm, diloco(interval, eta, mu, warmup), apart=True, exact=False)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_equal_their_equations(run_ranks, n):
    run_ranks(n, all_cases, env=BUCKETS, timeout=110)
