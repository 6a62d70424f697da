"""State that algorithms keep of gradients, under a GradScaler: resumed, and with a fused optimizer.

The equations under a changing scale are in test_compressed_gradients, test_error_feedback, test_powersgd, test_adam.
"""
import copy

import numpy as np
import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd.algorithms import ByteGrad, DoubleSqueeze, PowerSGD, TopK
from floats import assert_same_bits
from workers import backward, flat, gradient, make_model, start


def wrap(model, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.25, **options), algorithm=DoubleSqueeze())


def train(model, optimizer, scaler, steps, overflow=()):
    for t in steps:
        optimizer.zero_grad()
        g = gradient(hvd.rank(), t, flat(model))
        if t in overflow and hvd.rank() == 1:
            g[7] = np.inf
        backward(model, g, scaler)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


def scaler_of(scale=1024.0):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)


def skipped_where_something_begins():
    """An overflow in the very first step, and in the first one that sets state: bit for bit as without a scale."""
    hvd.init()
    for algorithm in (ByteGrad(error_feedback=True), DoubleSqueeze(momentum=0.5, full_steps=2), PowerSGD(full_steps=0),
                      TopK(full_steps=2)):
        ends = []
        for scaler in (None, scaler_of()):
            model = make_model(start(0, False))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.25), algorithm=algorithm)
            for t in range(5):
                if scaler is not None and t in (0, 2):
                    train(model, optimizer, scaler, [t], overflow=[t])
                train(model, optimizer, scaler, [t])
            ends.append(flat(model))
        assert_same_bits(*ends, type(algorithm).__name__)


def test_skipped_where_something_begins(run_ranks):
    run_ranks(2, skipped_where_something_begins)


def resumed(saved_after, scale):
    """Resumes bit for bit with the scaler's state, else raises an error. After 6 steps the scale has grown."""
    hvd.init()
    model, scaler = make_model(start(0, False)), scaler_of()
    optimizer = wrap(model)
    train(model, optimizer, scaler, range(saved_after))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scaler.state_dict()))
    train(model, optimizer, scaler, range(saved_after, 9))

    def load(scaler):
        other = make_model(np.zeros_like(start(0, False)))
        optimizer = wrap(other)
        other.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        return other, optimizer, scaler

    same = load(scaler_of(1.0))
    same[2].load_state_dict(saved[2])
    train(*same, range(saved_after, 9))
    assert_same_bits(flat(same[0]), flat(model), "resumed")
    for another, begins in ((scaler_of(8.0), "8"), (None, "1")):
        other = load(another)
        before = flat(other[0])
        with pytest.raises(ValueError, match=f"a loss scale of {scale}, and this training begins with {begins}: load"):
            train(*other, range(saved_after, saved_after + 1))
        assert_same_bits(flat(other[0]), before, "nothing was changed")
    # Within a process, as when an elastic job restores, the scaler is known and may have another scale.
    before, ends = copy.deepcopy((model.state_dict(), optimizer.state_dict())), []
    for scale in (scaler.get_scale(), 64.0):
        model.load_state_dict(before[0])
        optimizer.load_state_dict(copy.deepcopy(before[1]))
        scaler.update(scale)
        train(model, optimizer, scaler, range(8, 10))
        ends.append(flat(model))
    assert_same_bits(*ends, "another scale")


@pytest.mark.parametrize(("saved_after", "scale"), [(5, 2048), (6, 4096)])
def test_resumed(run_ranks, saved_after, scale):
    run_ranks(2, resumed, arguments={"saved_after": saved_after, "scale": scale}, timeout=60)


def fused():
    """A fused optimizer unscales by itself, and is called even for steps that it then skips."""
    hvd.init()
    ends = []
    for fused in (True, False):
        model, scaler = make_model(start(0, False)), scaler_of()
        train(model, wrap(model, fused=fused), scaler, range(10), overflow=(1, 4, 5))
        ends.append(flat(model))
    assert_same_bits(*ends, "fused")


def test_fused(run_ranks):
    run_ranks(2, fused)
