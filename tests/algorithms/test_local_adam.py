"""Local Adam against its equations, of all ranks.

    Adam's step, of each worker by itself; x, m and v become their means after every H-th, H_m-th and H_v-th local step
"""
import numpy as np
import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd.algorithms.research import LocalAdam
from workers import BUCKETS, Scaled, flat, gradient, make_model, of_adam, start, take_step

LR, BETA1, BETA2, EPS = 0.05, 0.9, 0.99, 1e-8
# H, H_m, H_v, warm-up, AdamW's decay or None for Adam with 0.1, whether under a loss scale that changes
CASES = ((1, 1, 1, 0, None, False), (2, 3, 5, 0, 0.5, False), (3, None, None, 2, None, True), (4, 4, 4, 1, 0.5, True))


def everyone(values):
    return hvd.allgather(torch.from_numpy(values.copy())[None]).numpy()


def run(H, H_m, H_v, warmup, decoupled, scaled):
    rank, n = hvd.rank(), hvd.size()
    model = make_model(start(0, False))
    kind, decay = (torch.optim.Adam, 0.1) if decoupled is None else (torch.optim.AdamW, decoupled)
    optimizer = kind(model.parameters(), lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=decay)
    optimizer = hvd.DistributedOptimizer(optimizer, algorithm=LocalAdam(H, H_m, H_v, warmup_steps=warmup))
    under_scale = Scaled(model, optimizer) if scaled else None
    intervals = {"x": H, "m": H_m or H, "v": H_v or H}
    x = [start(0, False).astype(float) for _ in range(n)]
    m, v = ([np.zeros_like(x[0]) for _ in range(n)] for _ in range(2))
    for t in range(20):
        gs = [gradient(i, t, each.astype(np.float32)) for i, each in enumerate(x)]
        take_step(model, optimizer, t, gs[rank], under_scale)
        if t < warmup:
            gs = [np.mean(gs, 0, np.float64)] * n
        for i, g in enumerate(gs):
            if decoupled is None:
                g = g + decay * x[i]
            else:
                x[i] = x[i] - LR * decay * x[i]
            m[i] = BETA1 * m[i] + (1 - BETA1) * g
            v[i] = BETA2 * v[i] + (1 - BETA2) * g * g
            x[i] = x[i] - LR * m[i] / (1 - BETA1 ** (t + 1)) / (np.sqrt(v[i] / (1 - BETA2 ** (t + 1))) + EPS)
        means = {"x": x, "m": m, "v": v}
        for name, interval in intervals.items():
            if t >= warmup and (t - warmup + 1) % interval == 0:
                means[name][:] = [np.mean(means[name], 0)] * n
        states = flat(model), of_adam(optimizer, "exp_avg"), of_adam(optimizer, "exp_avg_sq")
        after = [everyone(state) for state in states]
        for (name, wanted), actual in zip(means.items(), after, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5 * abs(np.array(wanted)).max(),
                                       err_msg=f"{name}, step {t}, {intervals}")
            meets = t >= warmup and (t - warmup + 1) % intervals[name] == 0
            assert (actual == actual[0]).all() == (meets or t < warmup or n == 1), (name, t)
        assert {int(state["step"]) for state in optimizer.state.values()} == {t + 1}
        x, m, v = ([each.astype(float) for each in values] for values in after)     # roundings do not add up
    assert not scaled or len(under_scale.scales) > 2


def equations():
    hvd.init()
    for case in CASES:
        run(*case)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_equals_its_equations(run_ranks, n):
    run_ranks(n, equations, env=BUCKETS, timeout=110)


def test_arguments():
    for name in ("communication_interval", "momentum_interval", "variance_interval"):
        with pytest.raises(ValueError, match=f"{name}=0: expected an integer of 1 or more"):
            LocalAdam(**{name: 0})
    made = LocalAdam(5)
    assert (made.momentum_interval, made.variance_interval) == (5, 5)


def refuses():
    hvd.init()
    with pytest.raises(ValueError, match="LocalAdam cannot serve this optimizer"):
        hvd.DistributedOptimizer(torch.optim.SGD(make_model(start(0, False)).parameters(), lr=0.1),
                                 algorithm="local_adam")


def test_refuses_what_is_no_adam(run_ranks):
    run_ranks(2, refuses)
