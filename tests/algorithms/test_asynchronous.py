"""Asynchronous averaging: its equations in a deterministic schedule, and its invariants in any schedule.

With sync_interval_ms=0 and max_staleness=1 a round begins after every step and ends after the next one, so that

    x_i <- x_i - step(g_i) + (1/n) sum_j s_j - s_i        s_i: x_i at the end of the step before
"""
import itertools
import time

import numpy as np
import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd.algorithms import Async, DiLoCo
from two_levels import LAYOUTS, environments
from workers import BUCKETS, SGD, F, assert_trains_as, backward, flat, gradient, make_model, start

EVERY_STEP = {"sync_interval_ms": 0, "max_staleness": 1}


def rounds(warmup=0):
    def simulate(n, places, xs):
        optimizers, snapshots = [SGD() for _ in range(n)], None
        for t in itertools.count():
            gs = [gradient(i, t, x.astype(F)) for i, x in enumerate(xs)]
            if t < warmup:
                gs = [np.mean(gs, 0, np.float64)] * n
            xs = [optimizers[i](x, g) for i, (x, g) in enumerate(zip(xs, gs, strict=True))]
            if t + 1 >= warmup:
                if snapshots:
                    mean = np.mean(snapshots, 0, np.float64)
                    xs = [x + (mean - s) for x, s in zip(xs, snapshots, strict=True)]
                snapshots = xs
            yield xs
    return simulate


def equations():
    hvd.init()
    assert_trains_as(Async(**EVERY_STEP), rounds(), apart=True, exact=False)
    assert_trains_as(Async(warmup_steps=3, **EVERY_STEP), rounds(3), exact=False)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_equal_their_equations(run_ranks, n):
    run_ranks(n, equations, env=BUCKETS, timeout=110)


@pytest.mark.parametrize("letters", LAYOUTS)
def test_equal_their_equations_between_hosts(run_ranks, letters):
    run_ranks(len(letters), equations, env=environments(letters, BUCKETS), timeout=110)


def wrap(model, algorithm, lr=0.25):
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), algorithm=algorithm)


def chance():
    """Ranks of different speed make different numbers of steps and stop at different times."""
    hvd.init()
    rank, n = hvd.rank(), hvd.size()
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for staleness in (None, 1, 3):
            model = make_model(start(rank, True)).to(dtype)
            optimizer = wrap(model, Async(sync_interval_ms=rank, max_staleness=staleness))
            for epoch in range(2):
                for t in range((2, 9, 5)[(rank + epoch) % 3]):
                    optimizer.zero_grad()
                    if t % 4 == 1:
                        sum(p.sum() for p in model.parameters())        # a forward pass without a backward pass
                    before = flat(model)
                    backward(model, gradient(rank, t, before))
                    time.sleep(0.002 * (rank + epoch) % 3)
                    np.testing.assert_array_equal(flat(model), before)  # weights change only in step()
                    optimizer.step()
                optimizer.algorithm.abort()
                aborted = flat(model)
                optimizer.algorithm.abort()
                np.testing.assert_array_equal(flat(model), aborted)
                assert np.isfinite(aborted).all() and all(p.dtype == dtype for p in model.parameters())
                optimizer.algorithm.resume()
                optimizer.algorithm.resume()
            optimizer.algorithm.abort()
            hvd.consensus(model)
            everyone = hvd.allgather(torch.from_numpy(flat(model))[None])
            assert (everyone == everyone[0]).all()
    assert n == 3


def test_ranks_of_different_speed(run_ranks):
    run_ranks(3, chance, env={"BAGUA_DEFAULT_BUCKET_SIZE": "512"}, timeout=110)


def preserved():
    """Without gradients, rounds preserve the mean of the ranks and reduce their distance."""
    hvd.init()
    model = make_model(start(hvd.rank(), True))
    optimizer = wrap(model, Async(sync_interval_ms=0, max_staleness=4))     # at least eight rounds, however slow
    first = hvd.allgather(torch.from_numpy(flat(model))[None]).numpy()
    for _ in range(40):
        optimizer.zero_grad()
        backward(model, np.zeros_like(first[0]))
        optimizer.step()
    optimizer.algorithm.abort()
    last = hvd.allgather(torch.from_numpy(flat(model))[None]).numpy()
    np.testing.assert_allclose(last.mean(0), first.mean(0), atol=1e-5)
    assert np.ptp(last, 0).max() < np.ptp(first, 0).max() / 2


@pytest.mark.parametrize("n", [2, 4])
def test_rounds_preserve_the_mean(run_ranks, n):
    run_ranks(n, preserved, timeout=100)


def left():
    """The first rank to finish leaves the job; the others make all their steps, and abort() returns."""
    hvd.init()
    model = make_model(start(hvd.rank(), True))
    optimizer = wrap(model, Async(full_steps=0))

    def take_step():
        optimizer.zero_grad()
        backward(model, np.zeros_like(flat(model)))
        optimizer.step()

    if hvd.rank() == 0:
        for _ in range(20):
            take_step()
        return
    take_step()
    with pytest.warns(UserWarning, match="rank 0 has left the job, so this rank continues without averaging"):
        while not optimizer.reducer.model.scratch["rounds"].over:
            take_step()
    take_step()
    optimizer.algorithm.abort()
    optimizer.algorithm.resume()
    take_step()


def test_the_first_rank_to_finish(run_ranks):
    run_ranks(2, left, timeout=60)


def added_later(kind):
    """add_param_group is refused while ranks make rounds, in which their buckets must be equal."""
    hvd.init()
    one, late = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    early, rank = torch.nn.Parameter(torch.ones(2)), hvd.rank()
    algorithm = (DiLoCo(1, quorum=2, outer_lr=1, codec=None) if kind == "quorum"
                 else Async(full_steps=0, warmup_steps=2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([one], lr=0.1), algorithm=algorithm)
    optimizer.add_param_group({"params": [early]})

    def train(steps, *parameters):
        for _ in range(steps):
            optimizer.zero_grad()
            sum((parameter * (1 + rank)).sum() for parameter in parameters).backward()
            optimizer.step()

    train(3 + rank, one, early)
    with pytest.raises(RuntimeError, match=r"cannot add parameters while .* call optimizer.algorithm.abort\(\)"):
        optimizer.add_param_group({"params": [late]})
    assert len(optimizer.param_groups) == 2
    algorithm.abort()
    optimizer.add_param_group({"params": [late]})
    hvd.barrier()               # rank 0 may be the server
    algorithm.resume()
    for _ in range(9):
        train(1, one, early, late)
        time.sleep(0.05)        # time for an average to arrive
    hvd.barrier()
    algorithm.abort()
    everyone = hvd.allgather(late.detach()[None])
    apart = 9 * 0.1 * (hvd.size() - 1)
    assert (everyone.max(0).values - everyone.min(0).values < apart * 0.9).all()


@pytest.mark.parametrize("kind", ["async", "quorum"])
def test_added_later(run_ranks, kind):
    run_ranks(2, added_later, arguments={"kind": kind}, timeout=60)


def stopped_before_the_first_round():
    """One rank stops before its first round while another waits in one."""
    hvd.init()
    model = make_model(start(hvd.rank(), True))
    # Rank 0 begins at once and waits for every round; the others would begin only after an hour.
    optimizer = wrap(model, Async(sync_interval_ms=0 if hvd.rank() == 0 else 3.6e6, max_staleness=1))
    for t in range(4 if hvd.rank() == 0 else 1):
        optimizer.zero_grad()
        backward(model, gradient(hvd.rank(), t, flat(model)))
        optimizer.step()
    optimizer.algorithm.abort()


@pytest.mark.parametrize("n", [2, 3])
def test_abort_takes_part_in_rounds_of_those_that_train(run_ranks, n):
    run_ranks(n, stopped_before_the_first_round)
