"""Dion against the algorithm of one worker that has the mean gradient, and the mean of all momenta:

    B = M + G       P = orth(B Q)       R = B^T P       M = B - (1 - mu) P R^T      Q = R / |columns|
    x = x - gamma s P Q^T - gamma lambda x              Adam for vectors and small matrices
"""
import math

import numpy as np
import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd.algorithms import Dion
from workers import BUCKETS, SHAPES, Scaled, dyadic, flat, gradient, make_model, take_step
from workers import start as first

LR, BETA1, BETA2, EPS, DECAY, MU, SCALE, FRACTION = 0.05, 0.9, 0.99, 1e-8, 0.1, 0.9, 0.3, 0.3
# By hand: rank of each of SHAPES; None: it travels whole.
RANKS = (2, None, None, 1, None, 2, None, 1)


def run(decoupled, scaled):
    rank, n = hvd.rank(), hvd.size()
    model = make_model(first(0, False))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)
    optimizer = hvd.DistributedOptimizer(optimizer, algorithm=Dion(FRACTION, MU, SCALE))
    under_scale, ends = Scaled(model, optimizer), np.cumsum([0, *map(math.prod, SHAPES)])
    x = flat(model).astype(float)
    Ms, Qs, m, v = {}, {}, np.zeros_like(x), np.zeros_like(x)
    for t in range(10):
        gs = [gradient(i, t, dyadic(8, t)) for i in range(n)]
        take_step(model, optimizer, t, gs[rank], under_scale if scaled else None)
        g = np.mean(gs, 0, np.float64) + (0 if decoupled else DECAY * x)
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
        adam = m / (1 - BETA1 ** (t + 1)) / (np.sqrt(v) / np.sqrt(1 - BETA2 ** (t + 1)) + EPS)
        for place, (shape, r) in enumerate(zip(SHAPES, RANKS, strict=True)):
            part = slice(ends[place], ends[place + 1])
            update = adam[part]
            if r is not None:
                G = g[part].reshape(shape[0], -1)
                B = Ms.get(place, 0) + G
                if place not in Qs:         # any that is equal on all ranks; the same as theirs
                    start = np.random.default_rng(place).standard_normal((G.shape[1], r)).astype(np.float32)
                    Qs[place] = np.linalg.qr(start)[0].astype(float)
                P = np.linalg.qr(B @ Qs[place])[0]
                R = B.T @ P
                Ms[place] = B - (1 - MU) * P @ R.T
                Qs[place] = R / np.linalg.norm(R, axis=0)
                update = SCALE * math.sqrt(max(G.shape)) * (P @ Qs[place].T).ravel()
            x[part] -= LR * (update + (DECAY * x[part] if decoupled else 0))
        np.testing.assert_allclose(flat(model), x, rtol=1e-3, atol=2e-5 * abs(x).max(), err_msg=f"step {t}")
    everyone = hvd.allgather(torch.from_numpy(flat(model))[None])
    assert (everyone == everyone[0]).all()
    momenta = torch.from_numpy(np.concatenate([bucket.state["momentum"] for bucket in optimizer.reducer.buckets]))
    everyone = hvd.allgather(momenta[None])
    assert all((each == everyone[0]).all() == (i == 0) for i, each in enumerate(everyone))


def equations():
    hvd.init()
    for decoupled, scaled in ((False, False), (True, False), (True, True)):
        run(decoupled, scaled)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_equals_its_equations(run_ranks, n):
    run_ranks(n, equations, env=BUCKETS, timeout=110)


def test_arguments():
    for wrong in ({"rank_fraction": 0}, {"rank_fraction": 1.5}, {"momentum": 1}, {"scale": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
            Dion(**wrong)
