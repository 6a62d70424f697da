"""Compressed gradient averaging against the equations, bit for bit.

bytegrad, doublesqueeze, rotated, topk:

    v_i = g_i + e_i                     e_i <- v_i - D(Q(v_i))
    u   = mean_i D(Q(v_i)) + f          f   <- u - D(Q(u))          g = D(Q(u)), chunk by chunk
    or  g = mean_i D(Q(v_i))            every rank decodes all
"""
import numpy as np
import pytest

import bagua_hvd.torch as hvd
from bagua_hvd import codecs
from bagua_hvd.algorithms import ByteGrad, DoubleSqueeze, Rotated, TopK
from two_levels import LAYOUTS, environments, members_of
from workers import BUCKETS, Errors, assert_trains_as, by_gradients, c_lp_s, seeds


def by_codes(codec, feedback, seeded=False, by_allgather=False, hosts=None):
    errors = Errors(two_levels=hosts is not None)
    return by_gradients(lambda t, b, gs: c_lp_s(
        codec, gs, seeds.of(t, b) if seeded else 0, errors.of(b, len(gs), len(gs[0])) if feedback else None,
        by_allgather, hosts=hosts))


CASES = [
    (ByteGrad, lambda: by_codes(codecs.minmax_uint8, False)),
    (lambda: ByteGrad(error_feedback=True), lambda: by_codes(codecs.minmax_uint8, True)),
    (lambda: ByteGrad(codec=codecs.block(4, 64)), lambda: by_codes(codecs.block(4, 64), False)),
    (lambda: ByteGrad(codec=codecs.block(4, 64), error_feedback=True), lambda: by_codes(codecs.block(4, 64), True)),
    (lambda: ByteGrad(codec=codecs.block(stochastic=True)),
     lambda: by_codes(codecs.block(stochastic=True), False, seeded=True)),
    (lambda: ByteGrad(codec=codecs.float8()), lambda: by_codes(codecs.float8(), False)),
    (Rotated, lambda: by_codes(codecs.rotated(2), False, seeded=True)),
    (lambda: Rotated(4, block=256), lambda: by_codes(codecs.rotated(4, 256), False, seeded=True)),
    (lambda: Rotated(1, error_feedback=True), lambda: by_codes(codecs.rotated(1), True, seeded=True)),
    (DoubleSqueeze, lambda: by_codes(codecs.sign, True)),
    (lambda: DoubleSqueeze(codecs.topk(0.1)), lambda: by_codes(codecs.topk(0.1), True)),
    (lambda: DoubleSqueeze(codecs.block(4, stochastic=True)),
     lambda: by_codes(codecs.block(4, stochastic=True), True, seeded=True)),
    (TopK, lambda: by_codes(codecs.topk(0.03), True, by_allgather=True)),
    (lambda: TopK(ratio=0.3), lambda: by_codes(codecs.topk(0.3), True, by_allgather=True)),
    (lambda: TopK(ratio=0.1, bits=2), lambda: by_codes(codecs.topk(0.1, 2), True, by_allgather=True)),
]


def all_cases(delay=0):
    hvd.init()
    for make, simulation in CASES:
        assert_trains_as(make(), simulation(), delay=delay)
    average = by_gradients(lambda t, b, gs: np.mean(gs, 0, np.float64))
    assert_trains_as("gradient_allreduce", average, exact=False, delay=delay)


def all_cases_under_a_loss_scale():
    hvd.init()
    for make, simulation in CASES:
        assert_trains_as(make(), simulation(), scaled=True)
    average = by_gradients(lambda t, b, gs: np.mean(gs, 0, np.float64))
    assert_trains_as("gradient_allreduce", average, exact=False, scaled=True)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_equal_their_equations_under_a_changing_loss_scale(run_ranks, n):
    """Errors are kept in true units, and a skipped step restores them."""
    run_ranks(n, all_cases_under_a_loss_scale, env=BUCKETS, timeout=110)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_equal_their_equations(run_ranks, n):
    run_ranks(n, all_cases, env=BUCKETS, timeout=110)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_equal_their_equations_one_step_late(run_ranks, n):
    """delay=1: each step applies the result for the gradients of the step before; see test_delay.py."""
    run_ranks(n, all_cases, arguments={"delay": 1}, env=BUCKETS, timeout=110)


def cases_in_two_levels(hosts):
    hvd.init()
    for make, codec, feedback, seeded in [
        (lambda: ByteGrad(hierarchical=True), codecs.minmax_uint8, False, False),
        (lambda: ByteGrad(hierarchical=True, error_feedback=True), codecs.minmax_uint8, True, False),
        (lambda: DoubleSqueeze(hierarchical=True), codecs.sign, True, False),
        (lambda: Rotated(3, hierarchical=True), codecs.rotated(3), False, True),
        (lambda: ByteGrad(codec=codecs.block(stochastic=True)), codecs.block(stochastic=True), False, True),
    ]:
        assert_trains_as(make(), by_codes(codec, feedback, seeded, hosts=hosts))
    for make, codec in ((TopK, codecs.topk(0.03)),):
        assert_trains_as(make(hierarchical=True), by_codes(codec, True, by_allgather=True, hosts=hosts))
    assert_trains_as(TopK(0.1, bits=2, hierarchical=True), by_codes(codecs.topk(0.1, 2), True, True, True, hosts))


@pytest.mark.parametrize("letters", [
    *(pytest.param(letters, marks=pytest.mark.long) for letters in LAYOUTS[:-1]), LAYOUTS[-1]])
def test_equal_their_equations_between_hosts(run_ranks, letters):
    run_ranks(len(letters), cases_in_two_levels, arguments={"hosts": members_of(letters)},
              env=environments(letters, BUCKETS))
