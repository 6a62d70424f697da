"""Invariants of every registered algorithm.

Loss scales are powers of two. Algorithms keep their state in true units, so the weights must be bit for bit those of
a training without a scale. tests/torch/test_matrix.py has the other cells.
"""
import torch

import bagua_hvd.torch as hvd
from every_algorithm import ADAM, ASYNC, LOCAL, NAMES, make
from floats import assert_same_bits
from workers import BUCKETS, Scaled, flat, gradient, make_model, start, take_step


def optimizer_for(name, parameters):
    if name in ADAM:
        return hvd.QAdamOptimizer(parameters, lr=0.125, warmup_steps=2)
    return torch.optim.SGD(parameters, lr=0.25, momentum=0.5)


def under_a_changing_scale():
    """With skipped steps where gradients are sent; averages of weights are made in skipped steps too."""
    hvd.init()
    for name in NAMES:
        if name in ASYNC:           # their rounds depend on timing
            continue
        ends = []
        for is_scaled in (False, True):
            model = make_model(start(0, False))
            optimizer = hvd.DistributedOptimizer(optimizer_for(name, model.parameters()), algorithm=make(name))
            scaled = Scaled(model, optimizer, skips=name not in LOCAL) if is_scaled else None
            for t in range(9):
                take_step(model, optimizer, t, gradient(hvd.rank(), t, flat(model)), scaled)
            ends.append(flat(model))
        assert len(scaled.scales) > 2
        assert abs(ends[0] - start(0, False)).max() > 0
        assert_same_bits(*ends, name)


def test_under_a_changing_scale(run_ranks):
    run_ranks(2, under_a_changing_scale, env=BUCKETS, timeout=110)
