"""Local momentum and the warm-up in full precision of error feedback, against the equations.

    m_i <- mu m_i + g_i
    g   = mean_i m_i                    in the first W steps
    g   = C_LP_S(m_i; Q, e_i, f_k)      from then on, with errors of zero at first
"""
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd import codecs
from bagua_hvd.algorithms import ByteGrad, DoubleSqueeze, PowerSGD, TopK, bytegrad
from bagua_hvd.core import native
from workers import (
    BUCKETS,
    Errors,
    F,
    assert_trains_as,
    backward,
    by_gradients,
    c_lp_s,
    dyadic,
    flat,
    gradient,
    make_model,
    start,
)


def error_feedback(codec, mu, warmup, by_allgather):
    momenta, errors = {}, Errors()

    def combine(t, b, gs):
        ms = momenta[b] = [F(mu) * m + g for m, g in zip(momenta.get(b, [F(0)] * len(gs)), gs, strict=True)]
        if t < warmup:
            return np.mean(ms, 0, np.float64)
        return c_lp_s(codec, ms, 0, errors.of(b, len(gs), len(gs[0])), by_allgather)
    return by_gradients(combine)


CASES = [
    (DoubleSqueeze, codecs.sign, False),
    (lambda **arguments: TopK(ratio=0.3, **arguments), codecs.topk(0.3), True),
]


def all_cases(scaled=False):
    hvd.init()
    for make, codec, by_allgather in CASES:
        for mu, warmup in ((0.9, 0), (0.0, 3), (0.9, 4)):
            # The order of a full-precision sum over ranks is undefined, so the result is only nearly equal.
            assert_trains_as(make(momentum=mu, warmup_steps=warmup), error_feedback(codec, mu, warmup, by_allgather),
                             exact=warmup == 0, scaled=scaled)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_equals_its_equations(run_ranks, n):
    run_ranks(n, all_cases, env=BUCKETS, timeout=110)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_equals_its_equations_under_a_changing_loss_scale(run_ranks, n):
    """Momenta and errors are kept in true units, and a skipped step restores them."""
    run_ranks(n, all_cases, arguments={"scaled": True}, env=BUCKETS, timeout=110)


def overflow():
    """An infinity on one rank reaches all ranks and stays neither in its momentum nor in an error."""
    hvd.init()
    model = make_model(start(0, False))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.25), algorithm=DoubleSqueeze(momentum=0.9, warmup_steps=3))
    for t in range(6):
        optimizer.zero_grad()
        g = gradient(hvd.rank(), t, flat(model))
        if t in (1, 4) and hvd.rank() == 1:
            g[7] = np.inf
        momentum = optimizer.reducer.buckets[0].state["momentum"].copy() if t else None
        backward(model, g)
        optimizer.synchronize()
        finite = all(bool(p.grad.isfinite().all()) for p in model.parameters())
        assert finite == (t not in (1, 4)), t
        if not finite and hvd.rank() == 1:
            np.testing.assert_array_equal(optimizer.reducer.buckets[0].state["momentum"], momentum)
        with optimizer.skip_synchronize():
            if finite:
                optimizer.step()
    assert np.isfinite(flat(model)).all()


def test_infinity_reaches_all_and_does_not_stay(run_ranks):
    run_ranks(2, overflow, timeout=40)


def passes_before_a_step():
    """Further passes add their gradients to the momentum, which decays once; zero_grad() takes them out of it."""
    hvd.init()
    mean = (hvd.size() + 1) / 2
    for make, _, _ in CASES:
        model = torch.nn.Linear(3, 2)
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
                                             algorithm=make(momentum=0.9, warmup_steps=100))
        momentum = 0.0

        def backward(model=model):
            model(torch.full((1, 3), hvd.rank() + 1.0)).sum().backward()

        for passes in (1, 2, 3, 2):
            optimizer.zero_grad()
            for _ in range(passes):
                backward()
            momentum = 0.9 * momentum + passes * mean
            torch.testing.assert_close(model.weight.grad, torch.full((2, 3), momentum))
            optimizer.step()
        momentum = 0.0      # since no copy was made before the first step of which gradients are zeroed
        for clear, to_none in ((optimizer.zero_grad, False), (optimizer.zero_grad, True), (model.zero_grad, True)):
            backward()
            clear(set_to_none=to_none)
            backward()
            momentum = 0.9 * momentum + mean
            torch.testing.assert_close(model.weight.grad, torch.full((2, 3), momentum))
            optimizer.step()
            clear(set_to_none=to_none)


def discarded():
    """Gradients that are communicated and zeroed, as those of a GAN's other loss, leave nothing for later steps."""
    hvd.init()
    for make in (PowerSGD, TopK, DoubleSqueeze, ByteGrad):
        model = torch.nn.Linear(16, 16, bias=False)
        torch.nn.init.zeros_(model.weight)
        options = {"codec": codecs.block(4), "error_feedback": True} if make is ByteGrad else {"full_steps": 0}
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(),
                                             algorithm=make(**options))
        for t in range(4):
            for passes in range(t % 3 + 1):
                (model(torch.ones(1, 16)) * torch.from_numpy(dyadic(9, t, passes, count=16))).sum().backward()
            optimizer.zero_grad()
            (model(torch.ones(1, 16)) * 0).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not model.weight.any(), make


def test_discarded(run_ranks):
    run_ranks(2, discarded)


def test_a_seed_needs_the_step():
    """Stochastic codecs count steps, so that checkpoints hold the count, even without full steps."""
    for codec in (codecs.block(4, stochastic=True), codecs.rotated(1)):
        assert DoubleSqueeze(codec, full_steps=0).counts_steps
    assert not DoubleSqueeze(full_steps=0).counts_steps


def test_leaving_in_a_full_step_sends_the_error(monkeypatch):
    monkeypatch.setattr(bytegrad, "error_state", lambda *_: "error")
    monkeypatch.setattr(bytegrad, "c_lp_s", lambda bucket, group, **how: how)
    bucket = SimpleNamespace(model=SimpleNamespace(step=0), step=0, seed=lambda step: 0, dtype=native.FLOAT32)
    algorithm = DoubleSqueeze(warmup_steps=1)
    assert algorithm.full_step(bucket.model)
    assert algorithm.leave(bucket, None)["error"] == "error"


def test_passes_before_a_step(run_ranks):
    run_ranks(2, passes_before_a_step)
