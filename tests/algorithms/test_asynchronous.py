"""Asynchronous averaging: its equations in a deterministic schedule, and its invariants in any schedule.

With sync_interval_ms=0 and max_staleness=1 a round begins after every step and ends after the next one, so that

    x_i <- x_i - step(g_i) + A(s)_i - s_i         s_i: x_i at the end of the step before
"""
import itertools
import time
from functools import partial

import numpy as np
import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd import codecs
from bagua_hvd.algorithms import Async, DiLoCo
from bagua_hvd.algorithms.rounds import NoRounds
from two_levels import LAYOUTS, environments, means, members_of, of_host
from workers import (
    BUCKETS,
    SGD,
    F,
    ReplicaSet,
    assert_trains_as,
    backward,
    c_lp_s,
    flat,
    gradient,
    make_model,
    pairs,
    start,
)

EVERY_STEP = {"sync_interval_ms": 0, "max_staleness": 1}


def rounds(delta, warmup=0):
    """delta(number of the round, snapshots): the change of each rank's weights one step later."""
    def simulate(n, places, xs):
        optimizers, snapshots, number = [SGD() for _ in range(n)], None, 0
        for t in itertools.count():
            gs = [gradient(i, t, x.astype(F)) for i, x in enumerate(xs)]
            if t < warmup:
                gs = [np.mean(gs, 0, np.float64)] * n
            xs = [optimizers[i](x, g) for i, (x, g) in enumerate(zip(xs, gs, strict=True))]
            if t + 1 >= warmup:
                if snapshots:
                    xs = [x + d for x, d in zip(xs, delta(number, snapshots), strict=True)]
                    number += 1
                snapshots = xs
            yield xs
    return simulate


def to_mean(number, s):
    return [np.mean(s, 0, np.float64) - x for x in s]


def to_peer(number, s):
    return [a - x for a, x in zip(pairs(len(s), number, s), s, strict=True)]


def to_neighbours(number, s):
    n = len(s)
    return [(s[i].astype(float) + s[i - 1] + s[(i + 1) % n]) / 3 - s[i] for i in range(n)]


def to_host(hosts, mode="shift_one"):
    """The mean of the two hosts that are paired in this round, weighted by their numbers of ranks."""
    def delta(number, s):
        sizes = [len(members) for members in hosts]
        averages = of_host(hosts, pairs(len(hosts), number, means("float32", s, hosts), sizes, mode))
        return [a - x for a, x in zip(averages, s, strict=True)]
    return delta


def to_neighbour_hosts(hosts):
    """h + sum_p 1/3 min(1, s_p / s_h) (p - h): h, p the means of this host and of its neighbours."""
    def delta(number, s):
        h, n, averages = means("float32", s, hosts), len(hosts), []
        for i, members in enumerate(hosts):
            share = [min(1, len(hosts[p % n]) / len(members)) / 3 for p in (i - 1, i + 1)]
            averages.append(h[i] + sum(a * (h[p % n].astype(float) - h[i])
                                       for a, p in zip(share, (i - 1, i + 1), strict=True)))
        return [a - x for a, x in zip(of_host(hosts, averages), s, strict=True)]
    return delta


def to_mean_by_codes(hosts=None):
    """d_i = s_i - y;  y += mean_i D(Q(d_i)), with the owner's error;  A - s_i = y - s_i + (d_i - D(Q(d_i))).

    hosts: a host's sum is encoded, times hosts / n; n / hosts times the loss of Q is added to the encoding rank's A.
    """
    kept = {}

    def delta(number, s):
        n, count = len(s), len(s[0])
        y = kept.setdefault("y", np.sum(s, 0) / F(n))
        servers = kept.setdefault("f", [np.zeros(count if hosts else -(-count // n), F) for _ in range(n)])
        d, lost = [x - y for x in s], [np.zeros(count, F) for _ in s]
        mean = c_lp_s(codecs.minmax_uint8, [v.copy() for v in d], errors=(lost, servers), hosts=hosts)
        y += mean
        ranks_per_host = F(n / len(hosts) if hosts else 1)
        return [mean - v + ranks_per_host * e for v, e in zip(d, lost, strict=True)]
    return delta


def to_neighbours_by_codes(hosts=None):
    """d_i = s_i - W;  h the mean of a host's d_i, W += D(Q(h));  A - s_i = h + (L + R - 2 W) / 3 - d_i."""
    kept = {}

    def delta(number, s):
        replicas = kept.setdefault("replicas", ReplicaSet(s, hosts))
        d = [x - replicas.around(i)[0] for i, x in enumerate(s)]
        h = replicas.means(d)
        replicas.add(codecs.minmax_uint8, h, number)
        return [h[i] + replicas.mixed(i, -2 / 3, 1 / 3, 1 / 3) - d[i] for i in range(len(s))]
    return delta


def equations():
    hvd.init()
    assert_trains_as(Async(**EVERY_STEP), rounds(to_mean), apart=True, exact=False)
    assert_trains_as(Async(warmup_steps=3, **EVERY_STEP), rounds(to_mean, 3), exact=False)
    assert_trains_as(Async(codec=codecs.minmax_uint8, **EVERY_STEP), rounds(to_mean_by_codes()), apart=True)
    if hvd.size() > 1:          # a single rank has no peer
        assert_trains_as(Async("ring", codec=codecs.minmax_uint8, **EVERY_STEP), rounds(to_neighbours_by_codes()),
                         apart=True)
        assert_trains_as(Async("shift_one", **EVERY_STEP), rounds(to_peer), apart=True)
        assert_trains_as(Async("ring", **EVERY_STEP), rounds(to_neighbours), apart=True, exact=False)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_equal_their_equations(run_ranks, n):
    run_ranks(n, equations, env=BUCKETS, timeout=110)


def cases_in_two_levels(hosts):
    hvd.init()
    for make, delta, exact in [
        (lambda: Async(hierarchical=True, **EVERY_STEP), to_mean, False),
        (lambda: Async(codec=codecs.minmax_uint8, hierarchical=True, **EVERY_STEP), to_mean_by_codes(hosts), True),
        (lambda: Async("shift_one", hierarchical=True, **EVERY_STEP), to_host(hosts), True),
        (lambda: Async("random", hierarchical=True, **EVERY_STEP), to_host(hosts, "random"), True),
        (lambda: Async("ring", hierarchical=True, **EVERY_STEP), to_neighbour_hosts(hosts), False),
        (lambda: Async("ring", codec=codecs.minmax_uint8, hierarchical=True, **EVERY_STEP),
         to_neighbours_by_codes(hosts), True),
    ]:
        assert_trains_as(make(), rounds(delta), apart=True, exact=exact)


@pytest.mark.parametrize("letters", LAYOUTS)
def test_equal_their_equations_between_hosts(run_ranks, letters):
    run_ranks(len(letters), cases_in_two_levels, arguments={"hosts": members_of(letters)},
              env=environments(letters, BUCKETS), timeout=110)


def codes_keep_the_mean():
    """Without gradients the mean over ranks stays, whatever error the codec makes, in one level and in two."""
    hvd.init()
    for hierarchical in (False, True):
        torch.manual_seed(hvd.rank())
        x = torch.nn.Parameter(torch.randn(4096) + hvd.rank() // 2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([x], lr=0), algorithm=Async(
            codec=codecs.sign, hierarchical=hierarchical, full_steps=0, **EVERY_STEP))
        before = hvd.allreduce(x.detach())
        for _ in range(30):
            x.grad = torch.zeros_like(x)
            optimizer.step()
        optimizer.algorithm.abort()
        assert (hvd.allreduce(x.detach()) - before).abs().mean() < 0.01


@pytest.mark.parametrize("letters", ["AAA", *LAYOUTS])
def test_codes_keep_the_mean(run_ranks, letters):
    run_ranks(len(letters), codes_keep_the_mean, env=environments(letters))


KINDS = [Async, partial(Async, codec=codecs.minmax_uint8), partial(Async, "shift_one"),
         partial(Async, "ring", codec=codecs.minmax_uint8)]


def wrap(model, algorithm, lr=0.25):
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), algorithm=algorithm)


def chance():
    """Ranks of different speed make different numbers of steps and stop at different times."""
    hvd.init()
    rank, n = hvd.rank(), hvd.size()
    for kind, dtype in itertools.product(KINDS, (torch.float32, torch.float64, torch.float16, torch.bfloat16)):
        for staleness in (None, 1, 3):
            model = make_model(start(rank, True)).to(dtype)
            optimizer = wrap(model, kind(sync_interval_ms=rank, max_staleness=staleness))
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
    rank = hvd.rank()
    for kind in KINDS:
        model = make_model(start(rank, True))
        optimizer = wrap(model, kind(sync_interval_ms=0, max_staleness=4))      # at least eight rounds, however slow
        first = hvd.allgather(torch.from_numpy(flat(model))[None]).numpy()
        for _ in range(40):
            optimizer.zero_grad()
            backward(model, np.zeros_like(first[0]))
            optimizer.step()
        optimizer.algorithm.abort()
        last = hvd.allgather(torch.from_numpy(flat(model))[None]).numpy()
        level = np.ptp(first) / 255
        np.testing.assert_allclose(last.mean(0), first.mean(0), atol=level if kind is KINDS[1] else 1e-5)
        assert np.ptp(last, 0).max() < np.ptp(first, 0).max() / 2, kind


@pytest.mark.parametrize("n", [2, 4])
def test_rounds_preserve_the_mean(run_ranks, n):
    run_ranks(n, preserved, timeout=100)


def left(mode):
    """The first rank to finish leaves the job; the others make all their steps, and abort() returns."""
    hvd.init()
    model = make_model(start(hvd.rank(), True))
    optimizer = wrap(model, Async(mode, full_steps=0))

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
        while not isinstance(optimizer.reducer.model.scratch["rounds"], NoRounds):
            take_step()
    take_step()
    optimizer.algorithm.abort()
    optimizer.algorithm.resume()
    take_step()


@pytest.mark.parametrize("mode", ["all", "shift_one", "ring"])
def test_the_first_rank_to_finish(run_ranks, mode):
    run_ranks(2, left, arguments={"mode": mode}, timeout=60)


def added_later(kind):
    """add_param_group is refused while ranks make rounds, in which their buckets must be equal."""
    hvd.init()
    one, late = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    early, rank = torch.nn.Parameter(torch.ones(2)), hvd.rank()
    algorithm = (DiLoCo(1, quorum=2, outer_lr=1, codec=None) if kind == "quorum"
                 else Async(kind, full_steps=0, warmup_steps=2))
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


@pytest.mark.parametrize("kind", ["all", "shift_one", "ring", "quorum"])
def test_added_later(run_ranks, kind):
    run_ranks(2, added_later, arguments={"kind": kind}, timeout=60)


def stopped_before_the_first_round():
    """One rank stops before its first round while another waits in one."""
    hvd.init()
    for kind in KINDS:
        model = make_model(start(hvd.rank(), True))
        # Rank 0 begins at once and waits for every round; the others would begin only after an hour.
        optimizer = wrap(model, kind(sync_interval_ms=0 if hvd.rank() == 0 else 3.6e6, max_staleness=1))
        for t in range(4 if hvd.rank() == 0 else 1):
            optimizer.zero_grad()
            backward(model, gradient(hvd.rank(), t, flat(model)))
            optimizer.step()
        optimizer.algorithm.abort()


@pytest.mark.parametrize("n", [2, 3])
def test_abort_takes_part_in_rounds_of_those_that_train(run_ranks, n):
    run_ranks(n, stopped_before_the_first_round)
