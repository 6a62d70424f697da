"""Gossip against the equations, bit for bit where the order of float32 sums is defined: decentralized (D-PSGD),
low_precision_decentralized (DCD-PSGD), choco. Replicas too: a rank's W is its left neighbour's R, its right one's L.
"""
import functools
import itertools

import numpy as np
import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd import codecs
from bagua_hvd.algorithms import (
    Choco,
    Decentralized,
    LowPrecisionDecentralized,
)
from two_levels import LAYOUTS, environments, means, members_of, of_host
from workers import BUCKETS, SGD, F, ReplicaSet, assert_trains_as, gradient, pairs, seeds


def d_psgd(average, interval=1, warmup=0):
    """The mean gradient in the warm-up. Then x' = sum_j W_ij x_j at every interval-th step, the first included;
    x = x' - step(g(x)), with g at the x before averaging.
    """
    def simulate(n, places, xs):
        optimizers = [SGD() for _ in range(n)]
        for t in itertools.count():
            gs = [gradient(i, t, x) for i, x in enumerate(xs)]
            if t < warmup:
                gs = [np.mean(gs, 0, np.float64).astype(F)] * n
            elif (t - warmup) % interval == 0:
                xs = average(n, (t - warmup) // interval, xs)
            xs = [optimizers[i](x, g) for i, (x, g) in enumerate(zip(xs, gs, strict=True))]
            yield xs
    return simulate


def everyone(n, s, xs):
    return [np.mean(xs, 0, np.float64)] * n


def both_neighbours(n, s, xs):
    return [(x + xs[i - 1] + xs[(i + 1) % n]) / F(3) for i, x in enumerate(xs)]


def pairs_of_hosts(hosts):
    """shift_one with hosts as peers, each with the mean of its ranks."""
    sizes = [len(members) for members in hosts]
    return lambda n, s, xs: of_host(hosts, pairs(len(hosts), s, means("float32", xs, hosts), sizes))


def after_steps(interval, communicate, hosts=None, warmup=0):
    """The mean gradient in the warm-up. Then local steps; after the first and every interval-th one,
    xs = communicate(t, replicas, xs).
    """
    def simulate(n, places, xs):
        optimizers, replicas = [SGD() for _ in range(n)], None
        for t in itertools.count():
            gs = [gradient(i, t, x) for i, x in enumerate(xs)]
            if t < warmup:
                gs = [np.mean(gs, 0, np.float64).astype(F)] * n
            xs = [optimizers[i](x, g) for i, (x, g) in enumerate(zip(xs, gs, strict=True))]
            if t >= warmup and (t - warmup) % interval == 0:
                replicas = replicas or ReplicaSet(xs, hosts)
                xs = communicate(t, replicas, xs)
            yield xs
    return simulate


def dcd_psgd(t, replicas, xs):
    """z = x + (L + R)/3 - 5/3 W, x the mean of a host's ranks."""
    means = replicas.means(xs)
    z = [means[i] + replicas.mixed(i, -5 / 3, 1 / 3, 1 / 3) for i in range(len(xs))]
    replicas.add(codecs.minmax_uint8, z, 0)
    return [replicas.around(i)[0].copy() for i in range(len(xs))]


def choco(codec, gamma):
    def communicate(t, replicas, xs):
        means = replicas.means(xs)
        seed = seeds.of(t, -1)          # the single bucket of weights
        replicas.add(codec, [means[i] - replicas.around(i)[0] for i in range(len(xs))], seed)
        share = gamma / 3
        return [x + replicas.mixed(i, -2 * share, share, share) for i, x in enumerate(means)]
    return communicate


def all_cases():
    hvd.init()
    n = hvd.size()
    assert_trains_as("decentralized", d_psgd(everyone), apart=True, exact=False)
    assert_trains_as(Decentralized(communication_interval=3), d_psgd(everyone, 3), apart=True, exact=False)
    if n > 1:
        for interval in (1, 2):
            for mode in ("shift_one", "exponential", "random"):
                algorithm = Decentralized(False, mode, communication_interval=interval)
                assert_trains_as(algorithm, d_psgd(functools.partial(pairs, mode=mode), interval), apart=True)
            algorithm = Decentralized(False, "ring", communication_interval=interval)
            assert_trains_as(algorithm, d_psgd(both_neighbours, interval), apart=True, exact=False)
    for interval in (1, 3):
        algorithm = LowPrecisionDecentralized(hierarchical=False, communication_interval=interval)
        model, optimizer = assert_trains_as(algorithm, after_steps(interval, dcd_psgd), apart=True)
        assert_replicas_agree(optimizer)
        algorithm = Choco(gamma=0.25, communication_interval=interval)
        assert_trains_as(algorithm, after_steps(interval, choco(codecs.sign, 0.25)), apart=True)
        assert_replicas_agree(optimizer)
    for codec in (codecs.block(4, stochastic=True), codecs.rotated(2, 256)):
        assert_trains_as(Choco(codec, 0.3), after_steps(1, choco(codec, 0.3)), apart=True)
    # The order of the sum over ranks is undefined in the warm-up, so the result is only nearly equal.
    algorithm = Decentralized(communication_interval=2, warmup_steps=3)
    assert_trains_as(algorithm, d_psgd(everyone, 2, 3), apart=True, exact=False)
    if n > 1:
        algorithm = Decentralized(False, "shift_one", warmup_steps=3)
        assert_trains_as(algorithm, d_psgd(pairs, 1, 3), apart=True, exact=False)
    algorithm = LowPrecisionDecentralized(hierarchical=False, communication_interval=2, warmup_steps=3)
    assert_trains_as(algorithm, after_steps(2, dcd_psgd, warmup=3), apart=True, exact=False)
    algorithm = Choco(gamma=0.25, communication_interval=2, warmup_steps=3)
    assert_trains_as(algorithm, after_steps(2, choco(codecs.sign, 0.25), warmup=3), apart=True, exact=False)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_equal_their_equations(run_ranks, n):
    run_ranks(n, all_cases, env=BUCKETS, timeout=110)


def cases_in_two_levels(hosts):
    hvd.init()
    for interval in (1, 2):
        algorithm = Decentralized(True, "shift_one", communication_interval=interval)
        assert_trains_as(algorithm, d_psgd(pairs_of_hosts(hosts), interval), apart=True)
        algorithm = LowPrecisionDecentralized(hierarchical=True, communication_interval=interval)
        assert_trains_as(algorithm, after_steps(interval, dcd_psgd, hosts), apart=True)
        algorithm = Choco(gamma=0.25, hierarchical=True, communication_interval=interval)
        assert_trains_as(algorithm, after_steps(interval, choco(codecs.sign, 0.25), hosts), apart=True)


# ABCC: three hosts, a period that does not divide the number of ranks.
@pytest.mark.parametrize("letters", [*LAYOUTS, "ABCC"])
def test_equal_their_equations_between_hosts(run_ranks, letters):
    run_ranks(len(letters), cases_in_two_levels, arguments={"hosts": members_of(letters)},
              env=environments(letters, BUCKETS))


def drawn_together():
    """Without gradients all models converge to the mean over all ranks, also within a host."""
    hvd.init()
    first = torch.arange(6.0) * (hvd.rank() + 1) ** 2
    wanted = hvd.allreduce(first, op=hvd.Average)
    for algorithm in (Choco(codecs.block(stochastic=True), 0.8, hierarchical=True),
                      LowPrecisionDecentralized(hierarchical=True), Decentralized(True, "shift_one")):
        parameter = torch.nn.Parameter(first.clone())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0), algorithm=algorithm)
        for _ in range(60):
            optimizer.zero_grad()
            parameter.sum().backward()
            optimizer.step()
        torch.testing.assert_close(parameter.detach(), wanted, rtol=0.02, atol=0.02 * float(wanted.max()))


def test_ranks_of_a_host_are_drawn_together_too(run_ranks):
    run_ranks(5, drawn_together, env=environments("ABCBC"), timeout=110)


def assert_replicas_agree(optimizer):
    rank, n = hvd.rank(), hvd.size()
    replicas = optimizer.reducer.model.weights[0].state["replicas"]
    mine = torch.from_numpy(np.stack([replicas.own, replicas.left, replicas.right]))
    every = hvd.allgather(mine[None])
    own = every[rank, 0]
    assert own.any() and torch.equal(own, every[rank - 1, 2]) and torch.equal(own, every[(rank + 1) % n, 1])
