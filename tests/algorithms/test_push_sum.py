"""Push-sum against its equations: default peers, and links that go one way, change, and fail at random."""
import itertools
import random

import numpy as np
import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd.algorithms.research import PushSum
from bagua_hvd.primitives import push
from two_levels import LAYOUTS, environments, members_of
from workers import BUCKETS, SGD, F, assert_trains_as, gradient


def failing(round, rank, size):
    """Rank i sends to some of i + 1 and i + 2, sometimes to none."""
    links = {(rank + 1) % size, (rank + 2) % size} - {rank}
    return [peer for peer in sorted(links) if random.Random(100 * round + 10 * rank + peer).random() < 0.6]


def exponential(round, rank, size):
    """By hand, for up to 5 ranks."""
    period = {1: [], 2: [1], 3: [1, 2], 4: [1, 2], 5: [1, 2, 4]}[size]
    return [(rank + period[round % len(period)]) % size] if period else []


def push_sum(peers, interval, warmup, hosts=None):
    """hosts: the ranks of each; they push sums over their ranks, of which each has an equal part then."""
    def push(round, values, n):
        of = hosts or [[i] for i in range(n)]
        sums = [sum(values[i] for i in members) for members in of]
        sends = [peers(round, h, len(of)) for h in range(len(of))]
        sums = [sum(sums[j] / (1 + len(sends[j])) for j in range(len(of)) if j == h or h in sends[j])
                for h in range(len(of))]
        return [next(sums[h] / len(members) for h, members in enumerate(of) if i in members) for i in range(n)]

    def simulate(n, places, zs):
        optimizers = [SGD() for _ in range(n)]
        xs, ws, met = None, [1.0] * n, None
        for t in itertools.count():
            gs = [gradient(i, t, z.astype(F)) for i, z in enumerate(zs)]
            if t < warmup:
                gs = [np.mean(gs, 0, np.float64)] * n
            zs = [optimizers[i](z, g) for i, (z, g) in enumerate(zip(zs, gs, strict=True))]
            if t >= warmup and (t - warmup + 1) % interval == 0:
                mine = zs if xs is None else [x + z - old for x, z, old in zip(xs, zs, met, strict=True)]
                round = (t - warmup) // interval
                xs, ws = (push(round, values, n) for values in (mine, ws))
                zs = [x / w for x, w in zip(xs, ws, strict=True)]
                met = zs
            yield zs
    return simulate


def equations():
    hvd.init()
    for peers, interval, warmup in ((exponential, 1, 0), (failing, 1, 0), (failing, 3, 2)):
        arguments = {} if peers is exponential else {"peers": failing}
        algorithm = PushSum(communication_interval=interval, warmup_steps=warmup, **arguments)
        assert_trains_as(algorithm, push_sum(peers, interval, warmup), steps=14, apart=warmup == 0, exact=False)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_equals_its_equations(run_ranks, n):
    run_ranks(n, equations, env=BUCKETS, timeout=110)


def cases_in_two_levels(hosts):
    hvd.init()
    for peers, interval, warmup in ((exponential, 1, 0), (failing, 1, 0), (failing, 3, 2)):
        algorithm = PushSum(peers, interval, warmup, hierarchical=True)
        simulation = push_sum(peers, interval, warmup, hosts)
        assert_trains_as(algorithm, simulation, steps=14, apart=warmup == 0, exact=False)


@pytest.mark.parametrize("letters", LAYOUTS)
def test_equals_its_equations_between_hosts(run_ranks, letters):
    run_ranks(len(letters), cases_in_two_levels, arguments={"hosts": members_of(letters)},
              env=environments(letters, BUCKETS), timeout=110)


def consensus_in_spite_of_failing_links():
    """Without gradients all models go to the mean of where they began."""
    hvd.init()
    rank, n = hvd.rank(), hvd.size()
    parameter = torch.nn.Parameter(torch.arange(5.0) * (rank - 1) ** 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0), algorithm=PushSum(failing))
    wanted = hvd.allreduce(parameter.detach(), op=hvd.Average)
    for _ in range(60):
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
    assert torch.allclose(parameter, wanted, rtol=1e-3, atol=1e-3), (parameter, wanted)
    x = optimizer.reducer.model.weights[0].state["x"]
    total = hvd.allreduce(torch.tensor(x), op=hvd.Sum)
    assert torch.allclose(total[:-1], n * wanted, rtol=1e-4, atol=1e-4) and abs(total[-1] - n) < 1e-4
    assert abs(x[-1] - 1) > 1e-3            # so a plain mean of what comes would not be right
    with pytest.raises(ValueError, match="expected ranks from 0 to 3, each once, and not"):
        push(x, hvd.global_process_set, [rank], "wrong")
    del optimizer           # one parameter is in one optimizer
    wrong = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0), algorithm=PushSum(lambda round, i, n: [n]))
    wrong.zero_grad()
    parameter.sum().backward()
    with pytest.raises(ValueError, match=f"peers=.4. of {rank} in round 0: expected numbers from 0 to 3, each once"):
        wrong.step()
    with pytest.raises(TypeError, match="expected a function of"):
        PushSum([1])


def test_consensus_in_spite_of_failing_links(run_ranks):
    run_ranks(4, consensus_in_spite_of_failing_links, timeout=110)
