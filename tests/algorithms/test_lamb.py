"""LAMB and 1-bit LAMB against their equations; LAMB also against Keras' own.

    u = m^ / p + lambda x               c = clip(||x|| / ||u||)             x = x - gamma c u           of each tensor
    1-bit: m' = s C_LP_S(m_i / s)       g = (m' - beta1 m) / (1 - beta1)    x = x - gamma r c_avg (m^' / p_T + lambda x)
"""
import math

import numpy as np
import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd.algorithms.research import Lamb
from workers import (
    BUCKETS,
    SHAPES,
    F,
    Scaled,
    dyadic,
    flat,
    gradient,
    make_model,
    of_adam,
    take_step,
)
from workers import start as first

LR, BETA1, BETA2, EPS, DECAY = 0.01, 0.9, 0.99, 1e-8, 0.5
C = 0.02, 1.5
WARMUP, STEPS = 4, 14
ENDS = np.cumsum([0, *map(math.prod, SHAPES)])
TENSORS = [slice(begin, end) for begin, end in zip(ENDS, ENDS[1:], strict=False)]


def denominator(v, updates):
    return np.sqrt(v) / np.sqrt(1 - BETA2**updates) + EPS


def clipped(x, u):
    norms = np.linalg.norm(x), np.linalg.norm(u)
    return 1.0 if 0 in norms else min(max(norms[0] / norms[1], C[0]), C[1])


def run(algorithm, decoupled, scaled=False):
    """Every step from where the ranks are: what rounding tips into another sign must not look like an error."""
    rank, n = hvd.rank(), hvd.size()
    model = make_model(first(0, False))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)
    optimizer = hvd.DistributedOptimizer(optimizer, algorithm=algorithm)
    under_scale = Scaled(model, optimizer)
    m, v = np.zeros_like(flat(model)), np.zeros_like(flat(model))
    seen = set()
    silent = dyadic(9) < -0.8
    for t in range(STEPS):
        x = flat(model)
        gs = [np.where(silent & (t < WARMUP), F(0), gradient(i, t, dyadic(8, t)) * F(0.25 + t % 3)) for i in range(n)]
        take_step(model, optimizer, t, gs[rank], under_scale if scaled else None)
        l2 = 0 if decoupled else F(DECAY) * x
        g = np.mean(gs, 0, np.float64) + l2
        m = (BETA1 * m + (1 - BETA1) * g).astype(F)
        v = BETA2 * v + (1 - BETA2) * g * g
        p, wanted = denominator(v, t + 1), x.astype(float)
        for part in TENSORS:
            u = m[part] / (1 - BETA1 ** (t + 1)) / p[part]
            u = u + (DECAY * x[part] if decoupled else 0)
            scale = clipped(x[part], u)
            seen.add("c at a bound" if scale in C else "c")
            wanted[part] -= LR * scale * u
        np.testing.assert_allclose(flat(model), wanted, rtol=2e-5, atol=2e-6 * abs(wanted).max(), err_msg=f"step {t}")
        after = of_adam(optimizer, "exp_avg")
        np.testing.assert_allclose(after, m, rtol=1e-5, atol=1e-6 * abs(m).max(), err_msg=f"step {t}")
        assert {int(state["step"]) for state in optimizer.state.values()} == {t + 1}
        m, v = after, of_adam(optimizer, "exp_avg_sq")
    everyone = hvd.allgather(torch.from_numpy(flat(model))[None])
    assert (everyone == everyone[0]).all()
    return seen


def equations():
    hvd.init()
    for decoupled, scaled in ((False, False), (True, False), (True, True)):
        assert run(Lamb(*C), decoupled, scaled) >= {"c", "c at a bound"}


@pytest.mark.parametrize("n", [1, 2, 4])
def test_equal_their_equations(run_ranks, n):
    run_ranks(n, equations, env=BUCKETS, timeout=110)


def test_arguments():
    for wrong in ({"c_min": 2, "c_max": 1}, {"c_min": 0}):
        with pytest.raises(ValueError, match="expected 0 < c_min <= c_max"):
            Lamb(**wrong)


def of_keras():
    import keras

    import bagua_hvd.tensorflow.keras as hvd_keras

    hvd_keras.init()
    ends = []
    for optimizer in (keras.optimizers.Lamb(0.01), None):
        variable = keras.Variable(np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4), name="x")
        optimizer = optimizer or hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.01), algorithm=Lamb())
        for t in range(6):
            optimizer.apply_gradients([(np.sin(np.arange(12, dtype="float32") + t).reshape(3, 4), variable)])
        ends.append(np.asarray(variable))
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-4)


@pytest.mark.long
def test_is_that_of_keras(run_ranks):
    pytest.importorskip("tensorflow")
    run_ranks(1, of_keras, framework="tensorflow", env={"HOROVOD_ELASTIC": "1"}, timeout=100)
