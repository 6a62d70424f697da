"""0/1 Adam against its equations, of all ranks.

    m_i <- beta1 m_i + (1 - beta1) g_i          x_i <- x_i - gamma m_i / p          u_i <- u_i + gamma m_i
    t in T_u:   u = C_LP_S(u_i, errors)         m_i <- u / sum(gamma)               x_i <- x_t' - u / p
    t in T_v:   Adam with the mean gradient

Unless bounded=False |m_i| is cut to (1 - beta1^(t+1)) c p, and |u| to the learning rates that it is made of times c p,
where c = max(1, (1 - beta1) / sqrt(1 - beta2)).
"""
import numpy as np
import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd import codecs
from bagua_hvd.algorithms.research import ZeroOneAdam
from bagua_hvd.torch.rank_states import kept_in, with_kept
from workers import (
    BUCKETS,
    Errors,
    F,
    Scaled,
    buckets_of,
    c_lp_s,
    dyadic,
    flat,
    gradient,
    make_model,
    of_adam,
    start,
    take_step,
    train,
)

LR, BETA1, BETA2, EPS = 0.01, 0.9, 0.99, 1e-8
KAPPA, FROZEN, SCALER, H = 2, 9, 4, 4
STEPS = 26
# By hand: two updates at intervals of 1, of 2, of 4; then none. Meetings at each step, then each, each 2nd, each 4th.
T_V = {0, 1, 3, 5}
T_U = {*range(FROZEN), 9, 10, 11, 12, 14, 16, 20, 24}


def schedules():
    algorithm = ZeroOneAdam(FROZEN, KAPPA, SCALER, H)
    assert {t for t in range(STEPS) if algorithm.updates_variance(t)} == T_V
    assert {t for t in range(STEPS) if algorithm.synchronizes(t)} == T_U
    assert all(algorithm.updates(t) == len([s for s in T_V if s < t]) for t in range(STEPS))
    with pytest.raises(ValueError, match="variance_steps=3: expected at least full_steps=4"):
        ZeroOneAdam(3, 4)
    assert not any(ZeroOneAdam(4, 4, 1, 1).synchronizes(t) is False for t in range(50))


def test_schedules():
    schedules()


def everyone(values):
    return hvd.allgather(torch.from_numpy(values.copy())[None]).numpy()


def equations(decoupled=False, scaled=False, bounded=True):
    hvd.init()
    most = max(1.0, (1 - BETA1) / (1 - BETA2) ** 0.5) if bounded else np.inf
    rank, n = hvd.rank(), hvd.size()
    decay = 0.5 if decoupled else 0.0
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    model = make_model(start(0, False))
    optimizer = kind(model.parameters(), lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=decay)
    optimizer = hvd.DistributedOptimizer(optimizer, algorithm=ZeroOneAdam(FROZEN, KAPPA, SCALER, H, bounded=bounded))
    places, errors = buckets_of(optimizer), Errors()
    under_scale = Scaled(model, optimizer) if scaled else None
    silent = dyadic(9) < -0.8               # no gradient while v is updated: they stay where they are
    ms = xs = v = anchor = us = None
    gammas = rates = 0.0
    for t in range(STEPS):
        gs = [np.where(silent & (t < FROZEN), F(0), gradient(i, t, dyadic(8, t))) for i in range(n)]
        take_step(model, optimizer, t, gs[rank], under_scale)
        gamma = LR / (1 - BETA1 ** (t + 1))
        updates = len([s for s in T_V if s <= t])
        if t < KAPPA:                       # torch's Adam on the mean: begin from what it has made
            ms, xs = everyone(of_adam(optimizer, "exp_avg")), everyone(flat(model))
            v = of_adam(optimizer, "exp_avg_sq")
            assert (xs == xs[0]).all()
            continue
        if t in T_V:
            g = np.mean(gs, 0, np.float64).astype(F)
            ms = [BETA1 * m + (1 - BETA1) * g for m in ms]
            v = BETA2 * v + (1 - BETA2) * g * g
            p = np.sqrt(v) / np.sqrt(1 - BETA2**updates) + EPS
            xs = [x - gamma * m / p - LR * decay * x for x, m in zip(xs, ms, strict=True)]
        else:
            p = np.sqrt(v) / np.sqrt(1 - BETA2**updates) + EPS
            if t - 1 in T_U:
                anchor, us, gammas, rates = xs[0], [np.zeros_like(x) for x in xs], 0.0, 0.0
            ms = [np.where(v == 0, F(0), BETA1 * m + (1 - BETA1) * g) for m, g in zip(ms, gs, strict=True)]
            ms = [np.clip(m, -LR / gamma * most * p, LR / gamma * most * p) for m in ms]
            us = [u + gamma * m for u, m in zip(us, ms, strict=True)]
            gammas, rates = gammas + gamma, rates + LR
            xs = [x - gamma * m / p for x, m in zip(xs, ms, strict=True)]
            if t in T_U:
                u = np.empty_like(anchor)
                for b, at in enumerate(places):
                    u[at] = c_lp_s(codecs.sign_rms, [each[at].astype(F) for each in us], 0, errors.of(b, n, len(at)))
                u[v == 0] = 0
                u = np.clip(u, -rates * most * p, rates * most * p)
                ms, xs = [u / gammas] * n, [anchor - u / p - rates * decay * anchor] * n
        after = everyone(of_adam(optimizer, "exp_avg")), everyone(flat(model))
        for name, actual, wanted in zip("mx", after, (ms, xs), strict=True):
            assert (actual == actual[0]).all() == (t in T_U) or n == 1, (name, t)
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5 * abs(np.array(wanted)).max(),
                                       err_msg=f"{name}, step {t}")
        np.testing.assert_allclose(of_adam(optimizer, "exp_avg_sq"), v, rtol=1e-5)
        assert {int(state["step"]) for state in optimizer.state.values()} == {t + 1}
        # From here on as the ranks are: what rounding tips into another sign must not look like an error.
        ms, xs = after
        v = of_adam(optimizer, "exp_avg_sq")
    assert (v == 0).any()
    assert not scaled or len(under_scale.scales) > 2


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("arguments", [{}, {"decoupled": True}, {"bounded": False}], ids=str)
def test_equals_its_equations(run_ranks, n, arguments):
    run_ranks(n, equations, arguments=arguments, env=BUCKETS, timeout=110)


def test_equals_its_equations_under_a_changing_loss_scale(run_ranks):
    run_ranks(2, equations, arguments={"scaled": True}, env=BUCKETS, timeout=110)


def between_meetings():
    """Saved where ranks differ, it goes on bit by bit; without what is a rank's own, ranks meet once in full."""
    hvd.init()
    rank = hvd.rank()

    def make(x):
        model = make_model(x)
        adam = torch.optim.Adam(model.parameters(), lr=LR)
        return model, hvd.DistributedOptimizer(adam, algorithm=ZeroOneAdam(FROZEN, KAPPA, SCALER, H))

    model, optimizer = make(start(0, False))
    train(rank, model, optimizer, range(19))
    assert (everyone(flat(model))[0] != flat(model)).any() == (rank > 0)
    saved = {name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict()
    saved = saved[0], torch.load(_bytes(saved[1]), weights_only=False)
    train(rank, model, optimizer, range(19, 23))
    other, resumed = make(np.zeros_like(start(0, False)))
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(rank, other, resumed, range(19, 23))
    assert (flat(other) == flat(model)).all()
    other, resumed = make(np.zeros_like(start(0, False)))
    other.load_state_dict(saved[0])
    kept = kept_in(saved[1])
    kept["state"]["rank"] += 1                          # another rank's
    resumed.load_state_dict(with_kept(saved[1], kept))
    train(rank, other, resumed, range(19, 21))
    ends = everyone(flat(other))
    assert np.isfinite(ends).all() and (ends == ends[0]).all()


def _bytes(state):
    import io

    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


def test_between_meetings(run_ranks):
    run_ranks(2, between_meetings, timeout=60)
