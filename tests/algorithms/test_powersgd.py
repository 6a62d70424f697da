"""PowerSGD against its equation.

    M_i = G_i + E_i     P = orth(mean_i M_i Q)     Q <- mean_i M_i^T P     G = P Q^T     E_i <- M_i - G
"""
import math

import numpy as np
import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd.algorithms import PowerSGD
from workers import (
    BUCKETS,
    COUNT,
    SGD,
    SHAPES,
    F,
    Scaled,
    backward,
    buckets_of,
    flat,
    gradient,
    make_model,
    start,
    take_step,
)


def matrices(rank):
    """{index: (slice of x, rows, columns)} of the matrices that are sent as two factors."""
    found, ends = {}, np.cumsum([0, *map(math.prod, SHAPES)])
    for index, shape in enumerate(SHAPES):
        rows = shape[0] if len(shape) > 1 else 0
        columns = math.prod(shape[1:])
        if rows and rows * columns > rank * (rows + columns):
            found[index] = slice(ends[index], ends[index + 1]), rows, columns
    return found


def errors(optimizer, places):
    """E_i of all ranks."""
    mine = np.zeros(COUNT, F)
    for at, bucket in zip(places, optimizer.reducer.buckets, strict=True):
        mine[at] = bucket.state["error"] / (bucket.model._loss_scale or 1) if "error" in bucket.state else 0
    return hvd.allgather(torch.from_numpy(mine)[None]).numpy().astype(float)


def equation(scaled=False):
    hvd.init()
    me, n = hvd.rank(), hvd.size()
    for r, warmup in ((1, 0), (2, 3)):
        model = make_model(start(0, False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
        optimizer = hvd.DistributedOptimizer(optimizer, algorithm=PowerSGD(rank=r, warmup_steps=warmup))
        large, places = matrices(r), buckets_of(optimizer)
        assert 0 < len(large) < len(SHAPES)
        bucket_of = {index: bucket for bucket in optimizer.reducer.buckets for index in bucket.members}
        name_of = {index: f"Q.{list(bucket.members).index(index)}" for index, bucket in bucket_of.items()}
        for index, (_, _, columns) in large.items():
            q = np.random.default_rng(index).standard_normal((columns, r)).astype(F)
            bucket_of[index].state.keep(name_of[index], lambda q=q: q, shared=True)

        # Each step starts from the actual E and Q: the power iteration amplifies rounding from step to step.
        sgd, before, under_scale = SGD(), np.zeros((n, COUNT)), Scaled(model, optimizer)
        for t in range(10):
            x = flat(model)
            gs = np.stack([gradient(i, t, x) for i in range(n)]).astype(float)
            qs = {index: bucket_of[index].state[name_of[index]].astype(float) for index in large}
            take_step(model, optimizer, t, gradient(me, t, x), under_scale if scaled else None)
            g, lost, after = gs.mean(0), np.zeros((n, COUNT)), errors(optimizer, places)
            for index, (at, rows, columns) in large.items() if t >= warmup else ():
                m = (gs[:, at] + before[:, at]).reshape(n, rows, columns)
                p = np.linalg.qr((m @ qs[index]).mean(0))[0]
                g[at] = (p @ (m.transpose(0, 2, 1) @ p).mean(0).T).ravel()
                lost[:, at] = m.reshape(n, -1) - g[at]
            actual = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy()
            tolerance = {"rtol": 0, "atol": 3e-6 * abs(gs + before).max()}
            np.testing.assert_allclose(actual, g, **tolerance, err_msg=f"step {t}, rank {r}")
            np.testing.assert_allclose(after, lost, **tolerance, err_msg=f"step {t}, rank {r}")
            np.testing.assert_array_equal(flat(model), sgd(x, actual))
            before = after
        everyone = hvd.allgather(torch.from_numpy(flat(model))[None])
        assert (everyone == everyone[0]).all()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_equals_its_equation(run_ranks, n):
    run_ranks(n, equation, env=BUCKETS, timeout=110)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_equals_its_equation_under_a_changing_loss_scale(run_ranks, n):
    """Errors are kept in true units, and a skipped step restores them."""
    run_ranks(n, equation, arguments={"scaled": True}, env=BUCKETS, timeout=110)


def buckets_in_another_order_on_every_rank():
    """Each rank uses its parameters in another order and waits for two allreduces per bucket."""
    hvd.init()
    torch.manual_seed(0)
    layers = torch.nn.ModuleList([torch.nn.Linear(12, 12) for _ in range(4)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers.parameters(), lr=0.1), algorithm=PowerSGD(1, 0),
                                         groups=[list(layer.parameters()) for layer in layers])
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.ones(2, 12)
        for layer in list(layers) if hvd.rank() % 2 else reversed(layers):
            x = layer(x).tanh()
        x.sum().backward()
        optimizer.step()


def test_order_of_buckets(run_ranks):
    run_ranks(3, buckets_in_another_order_on_every_rank, timeout=40)


def zeros_at_first():
    """A matrix without a gradient in the first steps (frozen or unused) takes part from its first gradient on."""
    hvd.init()
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), algorithm=PowerSGD(2, 0))
    generator = np.random.default_rng(0)
    gradient = (generator.standard_normal((8, 1)) @ generator.standard_normal((1, 8))).astype(F)    # rank 1: exact
    for t in range(4):
        optimizer.zero_grad()
        (weight * torch.from_numpy(gradient * (t > 1))).sum().backward()
        optimizer.step()
    # Error feedback makes up for the first basis, which is zero.
    np.testing.assert_allclose(weight.detach().numpy(), -2 * gradient, atol=1e-5)


def test_a_gradient_that_comes_late(run_ranks):
    run_ranks(2, zeros_at_first, timeout=40)


def overflow():
    """A NaN in one step does not affect later steps."""
    hvd.init()
    model = make_model(start(0, False))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.25), algorithm=PowerSGD(1, 0))
    for t in range(6):
        optimizer.zero_grad()
        g = gradient(hvd.rank(), t, flat(model))
        if t == 2 and hvd.rank() == 1:
            g[matrices(1)[5][0].start + 3] = np.inf
        backward(model, g)
        optimizer.synchronize()
        finite = [bool(p.grad.isfinite().all()) for p in model.parameters()]
        assert all(finite) == (t != 2) and finite[5] == (t != 2)
        with optimizer.skip_synchronize():
            if t != 2:
                optimizer.step()
    assert np.isfinite(flat(model)).all()


def test_nan_reaches_all_and_does_not_stay(run_ranks):
    run_ranks(2, overflow, timeout=40)


def scales():
    """Gradients times a power of two give the same steps times that power, bit for bit."""
    hvd.init()

    def trained(exponent):
        weight = torch.nn.Parameter(torch.zeros(24, 16))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), algorithm=PowerSGD(2, 0))
        for t in range(4):
            optimizer.zero_grad()
            gradient = np.random.default_rng([hvd.rank(), t]).standard_normal(weight.shape).astype(F)
            (weight * torch.from_numpy(np.ldexp(gradient, exponent))).sum().backward()
            optimizer.step()
        return np.ldexp(weight.detach().numpy(), -exponent)

    usual = trained(0)
    assert np.isfinite(usual).all()
    for exponent in (70, -80):
        np.testing.assert_array_equal(trained(exponent), usual, err_msg=f"2^{exponent}")


@pytest.mark.parametrize("n", [1, 3])
def test_any_scale_of_gradients(run_ranks, n):
    run_ranks(n, scales, timeout=60)
