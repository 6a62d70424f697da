"""qadam and onebit_adam against their equations.

The warm-up is Adam on the mean gradient. After its T updates v is frozen (Adam's weight decay, L2, is part of g_i):

    m_i = beta1 m + (1 - beta1) g_i         m = C_LP_S(m_i)
    x   = x - gamma / (1 - beta1^t) m / p, p = sqrt(v) / sqrt(1 - beta2^T) + eps    (AdamW: x -= gamma lambda x before)

onebit_adam: m = p C_LP_S(m_i / p), as published: m = C_LP_S(m_i), both with error feedback.
Where v = 0, m = 0.
Unless bounded=False, m_i and m are clipped to (1 - beta1^t) p c, where c = max(1, (1 - beta1) / sqrt(1 - beta2)).
"""
import numpy as np
import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd import codecs
from bagua_hvd.algorithms import OneBitAdam, QAdam
from floats import assert_same_bits
from two_levels import LAYOUTS, environments, members_of
from workers import (
    BUCKETS,
    Errors,
    F,
    Scaled,
    backward,
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
WARMUP, STEPS = 4, 12


def assert_near(actual, wanted, what):
    np.testing.assert_allclose(actual, wanted, rtol=2e-6, atol=2e-6 * abs(wanted).max(), err_msg=str(what))


def run(algorithm, codec, feedback, make_optimizer, hosts=None, scaled=False):
    """Compares each step from the ranks' actual weights, so that one rounding difference does not grow.

    hosts: the ranks of each host, for the hierarchical algorithm. scaled: steps under a loss scale (Scaled).
    """
    rank, n = hvd.rank(), hvd.size()
    model = make_model(start(0, False))
    optimizer = hvd.DistributedOptimizer(make_optimizer(model), algorithm=algorithm)
    decay, decoupled = optimizer.param_groups[0]["weight_decay"], isinstance(optimizer, torch.optim.AdamW)
    places, errors = buckets_of(optimizer), Errors(two_levels=hosts is not None)
    seeds, begin = {}, optimizer.algorithm._begin

    def seen(bucket, gradients):
        seeds[bucket.name] = bucket.seed(bucket.step)
        return begin(bucket, gradients)

    optimizer.algorithm._begin = seen
    m = v = np.zeros_like(start(0, False))
    under_scale, cut = Scaled(model, optimizer), 0
    silent, every_third = dyadic(9) < -0.8, np.arange(len(m)) % 3 == 0
    for t in range(STEPS):
        x = flat(model)
        # Elements without a gradient in the warm-up have no variance and never move. Some never get a gradient.
        gs = [np.where(silent & (every_third | (t < WARMUP + 2)), F(0), gradient(i, t, dyadic(8, t))) for i in range(n)]
        take_step(model, optimizer, t, gs[rank], under_scale if scaled else None)
        what = (type(optimizer.algorithm).__name__, t)
        if t < WARMUP:
            g = np.mean(gs, 0, np.float64) + (0 if decoupled else decay * x)
            m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
            assert_near(of_adam(optimizer, "exp_avg"), m, what)
        else:
            before, m = m, np.empty_like(x)
            longest = (1 - BETA1 ** (t + 1)) * max(1.0, (1 - BETA1) / (1 - BETA2) ** 0.5)

            def bound(m, p, most=longest if optimizer.algorithm.bounded else np.inf):
                return np.minimum(np.maximum(m, -most * p), most * p)

            p = np.sqrt(v) / F(np.sqrt(1 - BETA2**WARMUP)) + F(EPS)
            for b, at in enumerate(places):
                l2 = [g[at] if decoupled or not decay else g[at] + decay * x[at] for g in gs]
                m_i = [BETA1 * before[at] + (1 - BETA1) * g for g in l2]
                m_i = [bound(np.where(v[at] == 0, F(0), value), p[at]) for value in m_i]
                if feedback:
                    of_bucket = errors.of(b, n, len(at))
                    unit = p[at] if optimizer.algorithm.in_steps else F(1)
                    m[at] = c_lp_s(codec, [value / unit for value in m_i], 0, of_bucket, hosts=hosts) * unit
                else:
                    m[at] = c_lp_s(codec, m_i, seeds[optimizer.reducer.buckets[b].name], hosts=hosts)
            m[v == 0] = 0
            cut += int((m != bound(m, p)).sum())
            m = bound(m, p)
            assert_same_bits(of_adam(optimizer, "exp_avg"), m, what)
            assert_same_bits(of_adam(optimizer, "exp_avg_sq"), v, what)
        if t == WARMUP - 1:
            m, v = of_adam(optimizer, "exp_avg"), of_adam(optimizer, "exp_avg_sq")
        wide, T = m.astype(float), min(t + 1, WARMUP)
        step = LR / (1 - BETA1 ** (t + 1)) * wide / (np.sqrt(v) / np.sqrt(1 - BETA2 ** T) + EPS)
        wanted = x - step - (LR * decay * x if decoupled else 0)
        assert_near(flat(model), wanted, what)
        m = m if t < WARMUP - 1 else m.astype(F)
        assert {int(state["step"]) for state in optimizer.state.values()} == {t + 1}
    everyone = hvd.allgather(torch.from_numpy(flat(model))[None])
    assert (everyone == everyone[0]).all()
    return cut


def equations():
    hvd.init()
    arguments = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS}
    adams = [
        lambda model: torch.optim.Adam(model.parameters(), **arguments),
        lambda model: torch.optim.Adam(model.parameters(), weight_decay=0.5, **arguments),
        lambda model: torch.optim.AdamW(model.parameters(), weight_decay=0.5, **arguments),
    ]
    for make in adams:
        run(QAdam(warmup_steps=WARMUP), codecs.minmax_uint8, False, make)
    run(QAdam(warmup_steps=WARMUP, bounded=False), codecs.minmax_uint8, False, adams[0])
    run(QAdam(warmup_steps=WARMUP, codec=codecs.rotated(2)), codecs.rotated(2), False, adams[0])
    for make in adams[::2]:
        run(OneBitAdam(warmup_steps=WARMUP), codecs.sign_rms, True, make)
        # As published, all elements of a bucket get an m of the same size: it is clipped where v is small.
        assert run(OneBitAdam(published=True, warmup_steps=WARMUP), codecs.sign_rms, True, make)
        assert not run(OneBitAdam(published=True, warmup_steps=WARMUP, bounded=False), codecs.sign_rms, True, make)
    run("qadam", codecs.minmax_uint8, False,
        lambda model: hvd.QAdamOptimizer(model.parameters(), warmup_steps=WARMUP, **arguments))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_equal_their_equations(run_ranks, n):
    run_ranks(n, equations, env=BUCKETS, timeout=110)


def equations_under_a_loss_scale():
    hvd.init()

    def adam(model):
        return torch.optim.Adam(model.parameters(), lr=LR, betas=(BETA1, BETA2), eps=EPS)

    run(QAdam(warmup_steps=WARMUP), codecs.minmax_uint8, False, adam, scaled=True)
    run(OneBitAdam(warmup_steps=WARMUP), codecs.sign_rms, True, adam, scaled=True)
    run(OneBitAdam(published=True, warmup_steps=WARMUP), codecs.sign_rms, True, adam, scaled=True)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_equal_their_equations_under_a_changing_loss_scale(run_ranks, n):
    run_ranks(n, equations_under_a_loss_scale, env=BUCKETS, timeout=110)


def equations_in_two_levels(hosts):
    hvd.init()

    def adam(model):
        return torch.optim.Adam(model.parameters(), lr=LR, betas=(BETA1, BETA2), eps=EPS)

    run(QAdam(hierarchical=True, warmup_steps=WARMUP), codecs.minmax_uint8, False, adam, hosts)
    run(OneBitAdam(hierarchical=True, warmup_steps=WARMUP), codecs.sign_rms, True, adam, hosts)


@pytest.mark.parametrize("letters", LAYOUTS)
def test_equal_their_equations_between_hosts(run_ranks, letters):
    run_ranks(len(letters), equations_in_two_levels, arguments={"hosts": members_of(letters)},
              env=environments(letters, BUCKETS))


def pitfalls():
    hvd.init()
    rank = hvd.rank()

    # One algorithm object, two optimizers: each has its own warm-up.
    algorithm, models = QAdam(hierarchical=False), [make_model(start(0, False)) for _ in range(2)]
    optimizers = [
        hvd.DistributedOptimizer(hvd.QAdamOptimizer(model.parameters(), warmup_steps=warmup), algorithm=algorithm)
        for model, warmup in zip(models, (2, 5), strict=True)
    ]
    for t in range(6):
        for model, optimizer, warmup in zip(models, optimizers, (2, 5), strict=True):
            v = of_adam(optimizer, "exp_avg_sq") if t else None
            train(rank, model, optimizer, [t])
            assert t == 0 or (of_adam(optimizer, "exp_avg_sq") == v).all() == (t >= warmup)
    # A group added in the warm-up has its own bias correction; one added later has no variance.
    model, late = make_model(start(0, False)), torch.nn.Parameter(torch.ones(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=LR, betas=(BETA1, BETA2)),
                                         algorithm=QAdam(warmup_steps=4))
    train(rank, model, optimizer, range(2))
    optimizer.add_param_group({"params": [late]})
    for _ in range(2, 6):
        optimizer.zero_grad()
        late.sum().backward()
        before = late.detach().clone()
        optimizer.step()
        torch.testing.assert_close(before - late, torch.full((4,), LR), rtol=1e-3, atol=0)     # m and v of a constant
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    optimizer.zero_grad()
    backward(model, gradient(rank, 9, flat(model)))
    with pytest.raises(ValueError, match=r"noname\.2\.0 has no momentum and variance, .*: unfreeze .* add groups"):
        optimizer.step()
    # step(closure) works in the warm-up and after it.
    weights = []
    for in_closure in (False, True):
        model = make_model(start(0, False))
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), algorithm=QAdam(warmup_steps=2))

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            backward(model, gradient(rank, 3, flat(model)))
            return 0.5

        for _ in range(4):
            if in_closure:
                assert optimizer.step(closure) == 0.5
            else:
                closure()
                optimizer.step()
        weights.append(flat(model).copy())
    assert (weights[0] == weights[1]).all()
    # Their steps are changes in place to autograd, like torch's.
    for algorithm in ("qadam", "onebit_adam"):
        layers = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
        optimizer = hvd.QAdamOptimizer(layers.parameters(), warmup_steps=1)
        optimizer = hvd.DistributedOptimizer(optimizer, algorithm=algorithm)
        for _ in range(3):
            loss = layers(torch.ones(1, 3)).sum()
            loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            optimizer.synchronize()     # for the parameters that came before the error
            optimizer.zero_grad()
    # Changes of gradients or weights between the backward pass and the step are kept.
    model = make_model(start(0, False))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=LR), algorithm=QAdam(warmup_steps=1))
    for t in range(4):
        optimizer.zero_grad()
        backward(model, gradient(rank, t, flat(model)))
        optimizer.synchronize()
        if t:
            for parameter in model.parameters():
                parameter.grad.zero_()
        m = of_adam(optimizer, "exp_avg") if t else None
        with optimizer.skip_synchronize():
            optimizer.step()
        if t:
            np.testing.assert_allclose(of_adam(optimizer, "exp_avg"), m * F(0.9), atol=np.ptp(m) / 100)
    backward(model, gradient(rank, 5, flat(model)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(50)
    optimizer.step()
    assert 0 < abs(flat(model) - 50).max() < 40


def test_pitfalls(run_ranks):
    run_ranks(2, pitfalls, timeout=60)


def frozen_later():
    """Weights frozen after the warm-up stay, with their momenta, as in plain Adam; they train again once unfrozen."""
    hvd.init()
    for algorithm in (QAdam(warmup_steps=2), OneBitAdam(warmup_steps=2)):
        torch.manual_seed(0)
        first, frozen, never, last = (torch.nn.Parameter(torch.randn(3)) for _ in range(4))
        alone = torch.nn.Parameter(torch.randn(2, dtype=torch.float64))         # in its own bucket
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW([first, frozen, never, last, alone], lr=LR, weight_decay=0.1), algorithm=algorithm)
        never.requires_grad_(False)
        optimizer.zero_grad()
        for t in range(12):
            for parameter in (frozen, alone):
                parameter.requires_grad_(not 5 <= t < 9)
            before = [parameter.detach().clone() for parameter in (first, frozen, never, last, alone)]
            m = optimizer.state[frozen]["exp_avg"].clone() if t else None
            trained = [parameter for parameter in (first, frozen, last, alone) if parameter.requires_grad]
            sum((parameter.double() * (1 + hvd.rank())).sum() for parameter in trained).backward()
            optimizer.step()
            optimizer.zero_grad()
            for parameter, old in zip((first, frozen, never, last, alone), before, strict=True):
                moved = (old * (1 - LR * 0.1) - parameter.detach()) / LR
                if parameter.requires_grad:
                    assert (abs(moved - 1) < (0.02 if type(algorithm) is QAdam else 0.5)).all(), (moved, t)     # 1 bit
                else:
                    assert torch.equal(parameter, old), (type(algorithm).__name__, t)
            if 5 <= t < 9:
                assert torch.equal(optimizer.state[frozen]["exp_avg"], m)
    never.requires_grad_(True)
    never.sum().backward()
    with pytest.raises(ValueError, match=r"noname\.0\.2 has no momentum and variance, .*: unfreeze parameters"):
        optimizer.step()
    hvd.barrier()       # a rank that left would end the operations that the other posts before its error


@pytest.mark.parametrize("n", [1, 2])
def test_frozen_later(run_ranks, n):
    run_ranks(n, frozen_later)


def resumed():
    """Resumes with one weight per bucket in reversed order, after one weight was frozen for a while.

    Then drops the algorithm's state, as when ranks diverge: it holds nothing about how long a weight was frozen.
    """
    hvd.init()
    for algorithm in (QAdam(warmup_steps=2), OneBitAdam(warmup_steps=2)):
        weights = {name: torch.nn.Parameter(torch.ones(20)) for name in "abc"}

        def wrapped(names, weights=weights, algorithm=algorithm, **options):
            adam = torch.optim.Adam([{"params": weights[name]} for name in names], lr=LR)
            return hvd.DistributedOptimizer(adam, [(name, weights[name]) for name in names], algorithm=algorithm,
                                            **options)

        optimizer = wrapped("abc")
        for t in range(16):
            if t == 9:
                saved = optimizer.state_dict()
                saved["state"] = {2 - place: state for place, state in saved["state"].items()}
                weights["b"].requires_grad_(True)
                optimizer = wrapped("cba", groups=[[weight] for weight in weights.values()])
                optimizer.load_state_dict(saved)
            if t == 11:
                optimizer.reducer.model.drop_state(shared=True)
            weights["b"].requires_grad_(not 4 <= t < 12)
            optimizer.zero_grad()
            before = {name: weight.detach().clone() for name, weight in weights.items()}
            sum(weight.sum() for weight in weights.values() if weight.requires_grad).backward()
            optimizer.step()
            for name, weight in weights.items():
                steps = (before[name] - weight.detach()) / LR
                torch.testing.assert_close(steps, torch.full_like(steps, weight.requires_grad), atol=0,
                                           rtol=0.02 if type(algorithm) is QAdam else 0.5)


@pytest.mark.parametrize("n", [1, 2])
def test_resumed_in_other_buckets(run_ranks, n):
    run_ranks(n, resumed)


def changed_after_backward():
    """The first synchronize() drops what was sent of unchanged gradients, and the errors of that with it."""
    hvd.init()
    ends = []
    for synchronizes in (True, False):
        weight = torch.nn.Parameter(torch.ones(64))
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam([weight], lr=LR), algorithm=OneBitAdam(warmup_steps=2),
                                             gradients_untouched=True)
        for t in range(6):
            optimizer.zero_grad()
            if t == 5 and not synchronizes:
                optimizer.reducer.model.drop_state(shared=False)
            (weight * torch.from_numpy(dyadic(9, t, hvd.rank(), count=64))).sum().backward()
            if t == 5 and synchronizes:
                optimizer.synchronize()
            optimizer.step()
        [bucket] = optimizer.reducer.buckets
        ends.append((weight.detach(), torch.from_numpy(bucket.state["error"].worker)))
    assert all(map(torch.equal, *ends))


def test_errors_of_what_is_sent_again_are_fed_back_once(run_ranks):
    run_ranks(2, changed_after_backward)
