"""Gradient averaging by codes against the equations, bit for bit.

bytegrad, doublesqueeze, ef_signsgd, qsgd, terngrad, topk:

    v_i = g_i + e_i                     e_i <- v_i - D(Q(v_i))
    u   = mean_i D(Q(v_i)) + f          f   <- u - D(Q(u))          g = D(Q(u)), chunk by chunk
    or  g = mean_i D(Q(v_i))            every rank decodes all

terngrad: of each tensor v_i = clip(g_i, -c sigma, c sigma), sigma the root mean square of g_i's elements.
"""
import numpy as np
import pytest

import bagua_hvd.torch as hvd
from bagua_hvd import codecs
from bagua_hvd.algorithms import QSGD, ByteGrad, DoubleSqueeze, EFSignSGD, TernGrad, TopK
from workers import BUCKETS, Errors, F, assert_trains_as, by_gradients, c_lp_s


def scatter_gather(codec, feedback, seeded=False):
    errors = Errors()
    return by_gradients(lambda t, b, gs: c_lp_s(
        codec, gs, t if seeded else 0, errors.of(b, len(gs), len(gs[0])) if feedback else None))


def allgather(codec, feedback, seeded=False):
    errors = Errors()
    return by_gradients(lambda t, b, gs: c_lp_s(
        codec, gs, t if seeded else 0, errors.of(b, len(gs), len(gs[0])) if feedback else None, by_allgather=True))


def terngrad(clip):
    def combine(t, tensor, gs):
        bounds = [F(clip * np.sqrt(np.mean(g.astype(float) ** 2))) for g in gs]
        clipped = [np.clip(g, -c, c) for g, c in zip(gs, bounds, strict=True)]
        return c_lp_s(codecs.ternary, clipped, (t << 32) + tensor, by_allgather=True)
    return by_gradients(combine, each_tensor=True)


CASES = [
    (ByteGrad, scatter_gather(codecs.minmax_uint8, False)),
    (lambda: ByteGrad(error_feedback=True), scatter_gather(codecs.minmax_uint8, True)),
    (DoubleSqueeze, scatter_gather(codecs.sign, True)),
    (lambda: DoubleSqueeze(codecs.topk(0.1)), scatter_gather(codecs.topk(0.1), True)),
    (lambda: DoubleSqueeze(codecs.ternary), scatter_gather(codecs.ternary, True, seeded=True)),
    (EFSignSGD, allgather(codecs.sign, True)),
    (QSGD, scatter_gather(codecs.qsgd(127), False, seeded=True)),
    (lambda: QSGD(levels=4), scatter_gather(codecs.qsgd(4), False, seeded=True)),
    (TernGrad, terngrad(2.5)),
    (lambda: TernGrad(clip=None), terngrad(1e9)),
    (lambda: TernGrad(clip=1), terngrad(1)),
    (TopK, allgather(codecs.topk(0.01), True)),
    (lambda: TopK(ratio=0.3), allgather(codecs.topk(0.3), True)),
]


def all_cases():
    hvd.init()
    for make, simulation in CASES:
        assert_trains_as(make(), simulation)
    assert_trains_as("gradient_allreduce", by_gradients(lambda t, b, gs: np.mean(gs, 0, np.float64)), exact=False)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_equal_their_equations(run_ranks, n):
    run_ranks(n, all_cases, env=BUCKETS, timeout=110)
