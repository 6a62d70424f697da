"""Local steps against the equations: local_sgd, post-local SGD, diloco."""
import itertools
import math
from zlib import crc32

import numpy as np
import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd import codecs
from bagua_hvd.algorithms import DiLoCo, LocalSGD
from diloco import whole_diloco
from workers import BUCKETS, COUNT, SGD, SHAPES, Errors, F, assert_trains_as, c_lp_s, gradient, seeds


def local_sgd(interval, warmup):
    """Averaged gradients for `warmup` steps; then x_i <- x_i - step(g_i), and the mean after every interval-th step."""
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


def of_the_whole(interval, eta, mu, warmup=0):
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


def fragments(count):
    """The indices of each fragment's tensors: a tensor belongs to the fragment in which its middle lies."""
    ends = np.cumsum([0, *map(math.prod, SHAPES)])
    middles = [(begin + end) / 2 for begin, end in itertools.pairwise(ends)]
    of = [min(count - 1, math.floor(middle * count / COUNT)) for middle in middles]
    return [[place for place, its in enumerate(of) if its == p] for p in range(count)], ends


def diloco(interval, count, tau, alpha, eta, mu, codec, feedback=False, beta=1.0, warmup=0):
    """Fragment p is sent (p + 1) H / P local steps after the first and then every H: Delta_i = theta - x_i. tau steps
    later m = mu m + Delta; theta -= eta (Delta + mu m); x_i = alpha x_i + (1 - alpha) theta.
    """
    def simulate(n, places, xs):
        optimizers, errors = [SGD() for _ in range(n)], Errors()
        tensors, ends = fragments(count)
        theta, m, travelling = None, np.zeros(COUNT, F), {}
        for t in itertools.count():
            gs = [gradient(i, t, x.astype(F)) for i, x in enumerate(xs)]
            if t < warmup:
                gs = [np.mean(gs, 0, np.float64).astype(F)] * n
            if t == warmup:
                theta = np.mean(xs, 0, np.float64).astype(F)
            xs = [optimizers[i](x, g) for i, (x, g) in enumerate(zip(xs, gs, strict=True))]
            local = t - warmup + 1
            for p, its in enumerate(tensors):
                if not its:
                    continue
                at, first = slice(ends[its[0]], ends[its[-1] + 1]), (p + 1) * interval // count
                if local in range(first, 1000, interval):
                    deltas = [theta[at] - x[at] for x in xs]
                    seed = crc32(",".join(seeds.names[-1][place] for place in its).encode()) << 32 | t
                    error = errors.of(p, n, at.stop - at.start) if feedback else None
                    for each in itertools.chain(*error or ()):
                        each *= F(beta)
                    travelling[p] = np.sum(deltas, 0, np.float64).astype(F) if codec is None else c_lp_s(
                        codec, deltas, seed, error, by_allgather=codec.name.startswith("topk"), average=False)
                if local in range(first + tau, 1000, interval):
                    delta = travelling.pop(p) / F(n)
                    m[at] = F(mu) * m[at] + delta
                    theta[at] -= F(eta) * (delta + F(mu) * m[at])
                    for x in xs:
                        x[at] = F(alpha) * x[at] + F(1 - alpha) * theta[at]
            yield [x.copy() for x in xs]
    return simulate


STREAMS = ((4, 3, 1, 0.5, 0.7, 0.9, codecs.block(4, 64)), (3, 1, 0, 0.0, 0.7, 0.0, codecs.topk(0.1), True, 0.5),
           (5, 4, 2, 0.25, 0.5, 0.5, codecs.block(8, 64, stochastic=True), True, 1.0),
           (2, 1, 1, 0.0, 0.7, 0.0, codecs.topk(0.1, bits=2), True, 0.95),
           (4, 2, 1, 0.0, 0.7, 0.5, codecs.rotated(2)),
           (3, 2, 2, 0.5, 1.0, 0.5, None, False, 1.0, 2))


def streams():
    hvd.init()
    for interval, count, tau, alpha, eta, mu, codec, *rest in STREAMS:
        algorithm = DiLoCo(interval, count, tau, alpha, eta, mu, codec, *rest)
        simulation = diloco(interval, count, tau, alpha, eta, mu, codec, *rest)
        assert_trains_as(algorithm, simulation, steps=15, apart=codec is None, exact=codec is not None)
    for wrong in ({"fragments": 5}, {"overlap_steps": 4}):
        with pytest.raises(ValueError, match="with communication_interval=4, expected fragments <= 4"):
            DiLoCo(4, **wrong)


def all_cases():
    hvd.init()
    for interval, warmup in ((1, 0), (4, 0), (3, 4)):
        algorithm = LocalSGD(communication_interval=interval, warmup_steps=warmup)
        assert_trains_as(algorithm, local_sgd(interval, warmup), apart=warmup == 0, exact=False)
    for interval, eta, mu, warmup in ((1, 0.7, 0.9, 0), (3, 0.7, 0.9, 0), (3, 1.0, 0.0, 0), (2, 0.7, 0.9, 5)):
        algorithm = whole_diloco(interval, outer_lr=eta, outer_momentum=mu, warmup_steps=warmup)
        assert_trains_as(algorithm, of_the_whole(interval, eta, mu, warmup), apart=True, exact=False)
    if hvd.size() == 1:     # a single rank waits for no other and never misses a round
        algorithm = whole_diloco(3, outer_lr=0.7, outer_momentum=0.9, quorum=0.5, warmup_steps=2)
        assert_trains_as(algorithm, of_the_whole(3, 0.7, 0.9, 2), exact=False)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_equal_their_equations(run_ranks, n):
    run_ranks(n, all_cases, env=BUCKETS, timeout=110)


def frozen_later():
    """Frozen weights take the ranks' last outer step and then stay: momentum does not move them."""
    hvd.init()
    for algorithm in (whole_diloco(2, full_steps=0), DiLoCo(4, codec=None, full_steps=0)):
        frozen, other = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([frozen, other], lr=0.1), algorithm=algorithm)
        for step in range(24):
            frozen.requires_grad_(step < 9)
            optimizer.zero_grad()
            sum(((1 + hvd.rank()) * each).sum() for each in (frozen, other) if each.requires_grad).backward()
            optimizer.step()
            if step == 14:
                kept, moving = frozen.detach().clone(), other.detach().clone()
        assert (frozen == kept).all() and (other < moving).all()


@pytest.mark.parametrize("n", [1, 2])
def test_frozen_later(run_ranks, n):
    run_ranks(n, frozen_later)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_streams_equal_their_equations(run_ranks, n):
    run_ranks(n, streams, env=BUCKETS, timeout=110)


def broadcast_late():
    """Broadcasting diverged weights replaces the outer weights; broadcasting equal ones keeps them."""
    hvd.init()
    weight = torch.nn.Parameter(torch.full((4,), float(hvd.rank())))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0), [("weight", weight)],
                                         algorithm=whole_diloco(4, outer_lr=1.0, outer_momentum=0.5, full_steps=0))

    def step(size):
        optimizer.zero_grad()
        (size * weight).sum().backward()
        optimizer.step()

    step(0)
    hvd.broadcast_parameters([("weight", weight)], 1)
    for _ in range(3):
        step(1)
    # theta = 1, Delta = 3, m = 3
    torch.testing.assert_close(weight.detach(), torch.full((4,), 1 - 3 - 0.5 * 3))
    for _ in range(2):
        step(1)
    hvd.broadcast_parameters([("weight", weight)], 1)
    for _ in range(2):
        step(1)
    # Delta = 4, m = 0.5 * 3 + 4
    torch.testing.assert_close(weight.detach(), torch.full((4,), -3.5 - 4 - 0.5 * 5.5))


def test_broadcast_late(run_ranks):
    run_ranks(2, broadcast_late)
