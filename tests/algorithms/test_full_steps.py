"""Full steps among relaxed ones, and Adam's variance from them, against their equations.

    v   <- v + (1 - beta2) / (1 - beta2^T) (g^2 - v)        in the T-th full step
    w_i <- w_i + (1 - beta2) / (1 - beta2^t) (g_i^2 - w_i)  in every step
    x_i <- x_i - lr m_i / (1 - beta1^t) / (sqrt(min(max(v, w_i / n), w_i)) + eps)
"""
import copy

import numpy as np
import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd import algorithms, codecs
from bagua_hvd.algorithms.full_steps import count, is_full
from bagua_hvd.job import basics
from workers import COUNT, F, backward, buckets_of, flat, gradient, make_model, start

LR, BETA1, BETA2, EPS, FULL_STEPS, STEPS = 0.01, 0.9, 0.99, 1e-8, 2, 16
# Worked out by hand: two steps at intervals of 1, of 2, of 4, of 8.
EXACT = {0, 1, 3, 5, 9, 13}
EMPTIES = {3, 9}        # every other full step after the warm-up
RELAXED = ("decentralized", "low_precision_decentralized", "choco", "local_sgd", "diloco", "topk",
           "powersgd", "doublesqueeze")
ASYNCHRONOUS = ("async",)


def test_schedule():
    assert {t for t in range(STEPS) if is_full(t, FULL_STEPS)} == EXACT
    assert [count(t, FULL_STEPS) for t in (0, 1, 2, 3, 4, 16, 21, 22)] == [0, 1, 2, 2, 3, 6, 6, 7]
    assert not any(is_full(t, 0) for t in range(STEPS))
    assert count(10_000, 32) == 256 + 7     # 32 at each interval up to 128: the first 8,160 steps; then every 256th


def test_default_is_the_variable(monkeypatch):
    assert all(algorithms.get(name).full_steps == 0 for name in RELAXED + ASYNCHRONOUS)    # set for all tests
    monkeypatch.delenv("BAGUA_FULL_STEPS")
    for name in RELAXED + ASYNCHRONOUS:
        algorithm = algorithms.get(name)
        begins = 96 if name in ASYNCHRONOUS else 64       # asynchronous ranks cannot make full steps later
        assert algorithm.full_steps == 64 and algorithm.warmup_steps == begins and algorithm.shares_variance, name
    assert algorithms.get("topk", full_steps=0, warmup_steps=3).warmup_steps == 3
    with pytest.raises(ValueError, match="full_steps=-1: expected an integer"):
        algorithms.get("topk", full_steps=-1)


class Adam:
    """One rank's Adam, with the variance of the module's docstring. x -> x after the step."""

    def __init__(self, n):
        self.n, self.t, self.T, self.m, self.v, self.w = n, 0, 0, 0.0, 0.0, 0.0

    def __call__(self, x, g, exact):
        self.t += 1
        self.T += exact
        square = g * g
        self.m = BETA1 * self.m + (1 - BETA1) * g
        if exact:
            self.v += (1 - BETA2) / (1 - BETA2**self.T) * (square - self.v)
        self.w += (1 - BETA2) / (1 - BETA2**self.t) * (square - self.w)
        used = np.clip(self.v, self.w / self.n, self.w)
        used = np.maximum(used, (1 - BETA2) / (1 - BETA2**self.t) * square)      # the optimizer adds its own gradient
        return x - LR * self.m / (1 - BETA1**self.t) / (np.sqrt(used) + EPS)


def adam_of(model):
    return torch.optim.Adam(model.parameters(), lr=LR, betas=(BETA1, BETA2), eps=EPS)


def local_steps():
    """local_sgd, with each rank's steps simulated between the full ones; saved and loaded in the middle."""
    hvd.init()
    rank, n = hvd.rank(), hvd.size()
    model = make_model(start(0, False))

    def wrapped():
        return hvd.DistributedOptimizer(adam_of(model), algorithm=algorithms.LocalSGD(1000, full_steps=FULL_STEPS))

    optimizer, xs, adams = wrapped(), [flat(model).astype(float)] * n, [Adam(n) for _ in range(n)]
    for t in range(STEPS):
        if t == 8:
            state, optimizer = optimizer.state_dict(), wrapped()
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        backward(model, gradient(rank, t, flat(model)))
        optimizer.step()
        gs = [gradient(i, t, x.astype(F)).astype(float) for i, x in enumerate(xs)]
        if t in EXACT:
            gs = [np.mean(gs, 0)] * n
        xs = [adam(x, g, t in EXACT) for adam, x, g in zip(adams, xs, gs, strict=True)]
        np.testing.assert_allclose(flat(model), xs[rank], rtol=2e-4, atol=2e-5, err_msg=f"step {t}")
    assert n == 1 or not np.allclose(xs[0], xs[1], atol=1e-3)
    bare = [np.clip(adam.v, 0, adam.w / n).sum() for adam in adams]
    assert all(np.isfinite(bare)), "the bounds have been in use"


@pytest.mark.parametrize("n", [1, 2, 3])
def test_local_steps(run_ranks, n):
    run_ranks(n, local_steps, timeout=60)


def compressed(bits):
    """Every algorithm sends whole gradients in full steps, and Adam's variance follows the equations.

    With 8 bits, each of the two encodings has a relative error of up to 1/16, also for small elements.
    """
    hvd.init()
    near = {"rtol": 1e-4, "atol": 1e-5} if bits == 32 else {"rtol": 0.13, "atol": 0.04}
    rank, n, missed = hvd.rank(), hvd.size(), []
    for name in RELAXED:
        model = make_model(start(0, False))
        optimizer = hvd.DistributedOptimizer(adam_of(model), algorithm=algorithms.get(name, full_steps=FULL_STEPS))
        v, T, withheld = np.zeros(COUNT), 0, np.zeros(COUNT)
        exact = EXACT - EMPTIES if name == "topk" else EXACT
        for t in range(STEPS):
            optimizer.zero_grad()
            g = gradient(rank, t, flat(model))
            backward(model, g)
            optimizer.synchronize()
            mean = hvd.allreduce(torch.from_numpy(g.astype(np.float64)), name="mean").numpy()
            seen = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy()
            with optimizer.skip_synchronize():
                optimizer.step()
            withheld += mean - seen
            if name == "topk" and t in EMPTIES | {each + 1 for each in EMPTIES}:     # nothing is withheld here
                if np.allclose(withheld, 0, atol=(1e-4 if bits == 32 else 0.2) * abs(mean).max()) != (t in EMPTIES):
                    missed.append((name, t, "withheld", abs(withheld).max()))
            if t in exact:
                T += 1
                g = mean if bits == 32 else seen.astype(float)
                v += (1 - BETA2) / (1 - BETA2**T) * (g * g - v)
                if not np.allclose(seen, mean, near["rtol"], near["atol"] * abs(mean).max()):
                    missed.append((name, t, "not exact"))
                if (bits == 8) == np.allclose(seen, mean, 1e-4, 1e-5 * abs(mean).max()):
                    missed.append((name, t, "not of these bits"))
            elif t > 1 and np.allclose(seen, mean, 1e-4, 1e-5 * abs(mean).max()) and n > 1:
                missed.append((name, t, "exact"))
        mine = np.zeros(COUNT)
        for at, bucket in zip(buckets_of(optimizer), optimizer.reducer.buckets, strict=True):
            mine[at] = bucket.state["variance"]
        if not np.allclose(mine, v, rtol=1e-3, atol=1e-6 * v.max()):
            missed.append((name, abs(mine - v).max(), v.max()))
    assert not missed, missed


ON_TWO_HOSTS = [{"HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1", "HOROVOD_CROSS_RANK": str(rank),
                 "HOROVOD_CROSS_SIZE": "2", "BAGUA_FULL_STEP_BITS": ""} for rank in range(2)]


@pytest.mark.parametrize(("bits", "env"), [(8, {"BAGUA_FULL_STEP_BITS": "8"}), (32, {"BAGUA_FULL_STEP_BITS": "32"}),
                                           (32, {"BAGUA_FULL_STEP_BITS": ""}), (8, ON_TWO_HOSTS)],
                         ids=["8", "32", "one host", "two hosts"])
def test_every_algorithm(run_ranks, bits, env):
    run_ranks(2, compressed, arguments={"bits": bits}, env=env, timeout=60)


def emptied_in_any_dtype():
    hvd.init()
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        parameter = torch.nn.Parameter(torch.zeros(64, dtype=dtype))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0),
                                             algorithm=algorithms.TopK(ratio=0.1, full_steps=FULL_STEPS))
        for _ in range(max(EMPTIES) + 1):
            parameter.grad = None
            (parameter * torch.arange(64, dtype=dtype) / 64).sum().backward()
            optimizer.step()
        np.testing.assert_allclose(parameter.detach().double(), -(max(EMPTIES) + 1) * torch.arange(64).double() / 64,
                                   atol=0.1, err_msg=str(dtype))


def test_emptied_in_any_dtype(run_ranks):
    run_ranks(2, emptied_in_any_dtype, timeout=60)


def others():
    """Other optimizers and delay=1 keep no variance; asynchronous ranks are exact only at the beginning."""
    hvd.init()
    for make, delay in ((lambda p: torch.optim.SGD(p, lr=0.1), 0), (lambda p: torch.optim.Adam(p, amsgrad=True), 0),
                        (lambda p: torch.optim.Adam(p), 1)):
        model = make_model(start(0, False))
        optimizer = hvd.DistributedOptimizer(make(model.parameters()), delay=delay,
                                             algorithm=algorithms.TopK(full_steps=FULL_STEPS))
        for t in range(6):
            optimizer.zero_grad()
            backward(model, gradient(hvd.rank(), t, flat(model)))
            optimizer.step()
        assert not any("variance" in bucket.state for bucket in optimizer.reducer.buckets)
    for name in ASYNCHRONOUS:
        model = make_model(start(0, False))
        optimizer = hvd.DistributedOptimizer(adam_of(model), algorithm=algorithms.get(name, full_steps=2))  # 3 exact
        for t in range(3 + 5 * (hvd.rank() + 1)):       # different numbers of steps
            optimizer.zero_grad()
            backward(model, gradient(hvd.rank(), t, flat(model)))
            optimizer.step()
            if t == 2:
                everyone = hvd.allgather(torch.from_numpy(flat(model))[None])
                assert (everyone == everyone[0]).all()
        optimizer.algorithm.abort()
        assert all("variance" in bucket.state for bucket in optimizer.reducer.buckets)
        assert np.isfinite(flat(model)).all()


def test_others(run_ranks):
    run_ranks(2, others, timeout=60)


def one_is_frozen():
    """A frozen weight does not change the variance of the others in its bucket."""
    hvd.init()
    weights = {}
    for frozen in (False, True):
        a, b = torch.nn.Parameter(torch.zeros(5)), torch.nn.Parameter(torch.ones(5))
        optimizer = hvd.DistributedOptimizer(adam_of(torch.nn.ParameterList([a, b] if frozen else [a])),
                                             algorithm=algorithms.TopK(full_steps=FULL_STEPS), groups=1)
        b.requires_grad_(False)
        for t in range(8):
            optimizer.zero_grad()
            (a * torch.from_numpy(gradient(hvd.rank(), t, np.zeros(COUNT, F))[:5])).sum().backward()
            optimizer.step()
        assert all("variance" in bucket.state for bucket in optimizer.reducer.buckets)
        assert torch.equal(b.detach(), torch.ones(5))
        weights[frozen] = a.detach().clone()
    torch.testing.assert_close(weights[True], weights[False])


def test_one_is_frozen(run_ranks):
    run_ranks(2, one_is_frozen)


def frozen_and_unfrozen():
    """A weight frozen for a long time keeps its variance: its next steps are as long as those before."""
    hvd.init()
    for algorithm in (algorithms.PowerSGD(rank=1, full_steps=4), algorithms.LocalSGD(2, full_steps=4)):
        torch.manual_seed(0)
        other, frozen = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
        alone = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.float64))       # in its own bucket
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam([other, frozen, alone], lr=0.01), algorithm=algorithm)
        for t in range(320):
            frozen.requires_grad_(not 10 <= t < 310)
            alone.requires_grad_(frozen.requires_grad)
            optimizer.zero_grad()
            before, kept = frozen.detach().clone(), copy.deepcopy(optimizer.state[frozen])
            sum_of_all = other + frozen + alone if frozen.requires_grad else other
            (sum_of_all * (1 + 0.1 * torch.randn(4, 4))).sum().backward()
            optimizer.step()
            moved = abs(frozen.detach() - before) / 0.01
            if frozen.requires_grad:
                assert (moved < 1.7).all() and (moved.mean() > 0.3), (type(algorithm).__name__, t, moved)
            else:
                assert torch.equal(frozen, before)
                assert all(torch.equal(optimizer.state[frozen][name], value) for name, value in kept.items())


def test_frozen_and_unfrozen(run_ranks):
    run_ranks(2, frozen_and_unfrozen)


def seldom_used():
    """Local steps without a gradient skip a weight: then no step exceeds sqrt(n) times Adam's own."""
    hvd.init()
    used, seldom, alone = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam([used, seldom], lr=LR, betas=(0.0, 0.99)),
                                         algorithm=algorithms.LocalSGD(2, full_steps=FULL_STEPS))
    reference = torch.optim.Adam([alone], lr=LR, betas=(0.0, 0.99))
    for t in range(80):
        optimizer.zero_grad()
        weights = [used, seldom] if t < 8 or t % 20 == 0 else [used]
        sum(weight.sum() for weight in weights).backward()
        before = seldom.detach().clone(), alone.detach().clone()
        optimizer.step()
        if seldom.grad is not None:
            alone.grad = seldom.grad.clone()        # zeros in a full step
            reference.step()
        moved, allowed = (then - now.detach() for then, now in zip(before, (seldom, alone), strict=True))
        assert (allowed * 0.999 <= moved).all() and (moved <= allowed * 1.001 * 2 ** 0.5).all(), (t, moved, allowed)


def test_seldom_used(run_ranks):
    run_ranks(2, seldom_used)


def windows_of_a_step():
    """Each window of a step draws new random numbers."""
    hvd.init()
    parameter = torch.nn.Parameter(torch.zeros(1000))
    algorithm = algorithms.ByteGrad(codec=codecs.block(4, stochastic=True))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], 0.1), algorithm=algorithm)
    values, drawn = torch.rand(1000), []
    for _step in range(2):
        for _ in range(3):
            optimizer.zero_grad()
            (parameter * values).sum().backward()
            drawn.append(parameter.grad.clone())
        optimizer.step()
    for i in range(6):
        assert not any(torch.equal(drawn[i], drawn[j]) for j in range(i))


def test_windows_of_a_step(run_ranks):
    run_ranks(2, windows_of_a_step)


def bytes_sent():
    """Only full steps send as many bytes as gradient_allreduce."""
    hvd.init()
    parameter = torch.nn.Parameter(torch.zeros(200, 300))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam([parameter]),
                                         algorithm=algorithms.DoubleSqueeze(full_steps=FULL_STEPS))
    sent = []
    for _ in range(STEPS):
        before = basics.context().counters().payload_bytes_sent
        optimizer.zero_grad()
        (parameter * torch.randn(200, 300)).sum().backward()
        optimizer.step()
        hvd.barrier()
        sent.append(basics.context().counters().payload_bytes_sent - before)
    assert {t for t, each in enumerate(sent) if each > 4 * parameter.numel() * 0.9} == EXACT, sent


def test_bytes(run_ranks):
    run_ranks(2, bytes_sent, env={"BAGUA_HVD_TRANSPORT": "tcp"}, timeout=60)
