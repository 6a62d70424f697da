"""ACCO against its equations, of all ranks.

    step 2s         theta  = Adam(theta, (g + g~) / 2), g the mean of gradients at theta that were sent a step ago
    step 2s + 1     theta~ = Adam(theta, g~), g~ the mean of gradients at theta~ that were sent a step ago
"""
import copy

import numpy as np
import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd.algorithms import Acco
from floats import assert_same_bits
from workers import BUCKETS, COUNT, Scaled, flat, gradient, make_model, of_adam, start, take_step, train

LR, BETA1, BETA2, EPS, DECAY = 0.05, 0.9, 0.99, 1e-8, 0.2


def wrap(model, kind=torch.optim.Adam):
    adam = kind(model.parameters(), lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)
    return hvd.DistributedOptimizer(adam, algorithm="acco")


def updated(kind, theta, m, v, g, T):
    """Adam's T-th update."""
    if kind is torch.optim.Adam:
        g = g + DECAY * theta
    else:
        theta = theta - LR * DECAY * theta
    m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
    return theta - LR * m / (1 - BETA1**T) / (np.sqrt(v / (1 - BETA2**T)) + EPS), m, v


def equations():
    hvd.init()
    rank, n = hvd.rank(), hvd.size()
    for kind, scaled in ((torch.optim.Adam, False), (torch.optim.AdamW, False), (torch.optim.AdamW, True)):
        model = make_model(start(0, False))
        optimizer = wrap(model, kind)
        under_scale = Scaled(model, optimizer) if scaled else None
        theta, m, v = start(0, False).astype(float), np.zeros(COUNT), np.zeros(COUNT)
        x, sent, half = theta, None, None
        for t in range(13):
            gs = [gradient(i, t, x.astype(np.float32)) for i in range(n)]
            take_step(model, optimizer, t, gs[rank], under_scale)
            if t % 2:
                half = sent
                x = updated(kind, theta, m, v, half, (t + 1) // 2)[0]
            elif t:
                theta, m, v = updated(kind, theta, m, v, (half + sent) / 2, t // 2)
                x = theta
            sent = np.mean(gs, 0, np.float64)
            for actual, wanted in ((flat(model), x), (of_adam(optimizer, "exp_avg"), m),
                                   (of_adam(optimizer, "exp_avg_sq"), v)):
                np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-4 * max(1e-3, abs(wanted).max()),
                                           err_msg=f"step {t}")
            x = flat(model).astype(float)
            everyone = hvd.allgather(torch.from_numpy(flat(model))[None])
            assert (everyone == everyone[0]).all()
        assert not scaled or len(under_scale.scales) > 2


@pytest.mark.parametrize("n", [1, 2, 3])
def test_equals_its_equations(run_ranks, n):
    run_ranks(n, equations, env=BUCKETS, timeout=110)


def between():
    """Saved before and after an estimate, it goes on bit by bit, and what travels is waited for by who saves."""
    hvd.init()
    for saved_at in (4, 5):
        model = make_model(start(0, False))
        optimizer = wrap(model)
        train(hvd.rank(), model, optimizer, range(saved_at))
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(hvd.rank(), model, optimizer, range(saved_at, 9))
        other = make_model(np.zeros(COUNT, np.float32))
        resumed = wrap(other)
        train(hvd.rank(), other, resumed, range(3))
        other.load_state_dict(state[0])
        resumed.load_state_dict(state[1])
        train(hvd.rank(), other, resumed, range(saved_at, 9))
        assert_same_bits(flat(other), flat(model), f"saved after step {saved_at}")


def test_checkpoints(run_ranks):
    run_ranks(2, between, timeout=60)


def new_job():
    """What travelled when the job was shut down is lost on all ranks, which go on as one."""
    hvd.init()
    model = make_model(start(0, False))
    optimizer = wrap(model)
    for steps in (range(3), range(3, 7)):
        train(hvd.rank(), model, optimizer, steps)
        everyone = hvd.allgather(torch.from_numpy(flat(model))[None])
        assert torch.isfinite(everyone).all() and (everyone == everyone[0]).all()
        hvd.shutdown()
        hvd.init()


def test_new_job(run_ranks):
    run_ranks(2, new_job, env={"HOROVOD_ELASTIC": "1"}, timeout=60)


def test_class():
    assert not Acco.models_differ and not Acco().gradients_only
