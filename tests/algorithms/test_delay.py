"""delay=1: each step applies the average of the step before (Pipe-SGD of width two), against NumPy.

    x_{t+1} = x_t - step(g_{t-1})       g_{-1} = 0      g_t = the algorithm's average of the gradients at x_t

The same in TensorFlow and Keras: tests/tensorflow/test_delay.py, tests/keras/test_delay.py.
"""
import contextlib
import copy
import gc
import itertools
import time
import weakref

import numpy as np
import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd import algorithms, codecs
from bagua_hvd.algorithms import Algorithm, ByteGrad, DoubleSqueeze, PowerSGD, TopK
from bagua_hvd.job.runtime import runtime
from bagua_hvd.torch.wrapping import with_kept
from floats import assert_same_bits
from two_phases import TwoPhases, named
from workers import (
    BUCKETS,
    COUNT,
    SGD,
    Errors,
    F,
    backward,
    buckets_of,
    c_lp_s,
    dyadic,
    flat,
    gradient,
    make_model,
    start,
)


def mean(made, b, gs):
    return np.mean(gs, 0, np.float64)


def wrap(model, lr=0.25, momentum=0.5, **options):
    options.setdefault("delay", 1)
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum), **options)


def gradients(model):
    return torch.cat([p.grad.reshape(-1).float() for p in model.parameters()]).numpy()


def powersgd():
    """With the same gradients, delay=1 applies the results of PowerSGD without a delay, one step later."""
    hvd.init()
    ends = []
    for delay in (0, 1):
        model = make_model(start(0, False))
        optimizer, applied = wrap(model, algorithm=PowerSGD(rank=1, warmup_steps=2), delay=delay), []
        for t in range(8):
            optimizer.zero_grad()
            backward(model, gradient(hvd.rank(), t, start(0, False)))
            applied.append(gradients(model).copy())
            optimizer.step()
        ends.append(applied)
    in_time, late = ends
    assert not late[0].any()
    for t in range(7):
        assert_same_bits(late[t + 1], in_time[t], f"step {t}")


def test_powersgd(run_ranks):
    run_ranks(3, powersgd, env=BUCKETS, timeout=60)


# ------------------------------------------------------------------------------------------------- loss scaling ----

LOST = (3, 7)       # steps in which a gradient of the last rank is infinite


def scaled_oracle(n, places, combine, steps):
    """The weights after each step. A lost average is not applied, and leaves the errors as they were.

    combine(made, b, gs): made is the number of steps applied so far.
    """
    optimizer, x, arrived, made = SGD(), start(0, False), np.zeros(COUNT, F), 0
    for t in range(steps):
        gs = [gradient(i, t, x) for i in range(n)]
        g = None
        if t not in LOST:
            g = np.empty(COUNT, F)
            for b, at in enumerate(places):
                g[at] = combine(made, b, [g_i[at] for g_i in gs])
        if arrived is not None:
            x, made = optimizer(x, arrived), made + 1
        arrived = g
        yield x


def by_codes(codec, n):
    errors = Errors()
    return lambda made, b, gs: c_lp_s(codec, gs, 0, errors.of(b, n, len(gs[0])))


def under_a_changing_scale():
    hvd.init()
    rank, n = hvd.rank(), hvd.size()
    for way, fused in (("step", None), ("step", True), ("unscale", None)):
        for algorithm, make in ((None, None), (DoubleSqueeze, lambda: by_codes(codecs.sign, n)),
                                (lambda: ByteGrad(error_feedback=True), lambda: by_codes(codecs.minmax_uint8, n))):
            model = make_model(start(0, False))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5, fused=fused)
            optimizer = hvd.DistributedOptimizer(optimizer, algorithm=algorithm and algorithm(), delay=1)
            simulated = scaled_oracle(n, buckets_of(optimizer), make() if make else mean, 11)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_factor=8.0, growth_interval=2)
            scales = set()
            for t, expected in enumerate(simulated):
                what = f"{type(optimizer.algorithm).__name__}, {way}, fused={fused}, step {t}, rank {rank} of {n}"
                scales.add(scaler.get_scale())
                optimizer.zero_grad()
                g = gradient(rank, t, flat(model))
                if t in LOST and rank == n - 1:
                    g[7] = np.inf
                backward(model, g, scaler)
                if way == "unscale":
                    scaler.unscale_(optimizer)
                    hvd.clip_grad_norm_(optimizer, 1e6)
                scaler.step(optimizer)
                scaler.update()
                if algorithm is None:
                    np.testing.assert_allclose(flat(model), expected, rtol=1e-6, atol=1e-6, err_msg=what)
                elif way == "unscale":          # clipping that does not bind multiplies by 1 - rounding
                    np.testing.assert_allclose(flat(model), expected, rtol=1e-3, atol=1e-3, err_msg=what)
                else:
                    assert_same_bits(flat(model), expected.astype(F), what)
            assert len(scales) > 3


@pytest.mark.parametrize("n", [1, 2, 3])
def test_under_a_changing_loss_scale(run_ranks, n):
    """Gradients are sent in true units, and a skipped step restores the errors."""
    run_ranks(n, under_a_changing_scale, env=BUCKETS, timeout=110)


# ------------------------------------------------------------------------------------------------- training loops ----


def loops():
    """Accumulation, no_sync, clipping, sums, compression, bfloat16, process sets: the plain mean, one step late."""
    hvd.init(process_sets=[hvd.ProcessSet([0, 2])])
    rank = hvd.rank()
    x = start(0, False)

    def sent(t, rank):
        return gradient(rank, t, x)

    def late_means(options, passes, steps, ranks=range(3), dtype=torch.float32, no_sync=False, clip=None, factor=1 / 3):
        model = make_model(x).to(dtype)
        optimizer, means = wrap(model, **options), [np.zeros(COUNT, F)]
        for t in range(steps):
            optimizer.zero_grad()
            for p in range(passes):
                with optimizer.no_sync() if no_sync and p < passes - 1 else contextlib.nullcontext():
                    backward(model, sent(passes * t + p, rank))
            means.append(factor * sum(sent(passes * t + p, i) for p in range(passes) for i in ranks))
            expected = means[t]
            if clip is not None:
                optimizer.synchronize()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                np.testing.assert_allclose(norm, np.linalg.norm(expected), rtol=1e-4)
                expected = expected * min(1, clip / (np.linalg.norm(expected) + 1e-6))
                with optimizer.skip_synchronize():
                    optimizer.step()
            coarse = {torch.bfloat16: 2e-2}.get(dtype, 1e-3 if "compression" in options else 1e-5)
            np.testing.assert_allclose(gradients(model), expected, rtol=coarse, atol=coarse, err_msg=f"step {t}")
            if clip is None:
                optimizer.step()
        everyone = hvd.allgather(torch.from_numpy(flat(model))[None], name="same").numpy()
        assert all((everyone[i] == everyone[ranks[0]]).all() for i in ranks)

    late_means({}, 1, 3)
    late_means({"backward_passes_per_step": 2}, 2, 3)
    late_means({}, 3, 3, no_sync=True)
    late_means({}, 1, 3, clip=0.5)
    late_means({"gradients_untouched": False, "op": hvd.Sum}, 1, 3, factor=1)
    late_means({"gradient_predivide_factor": 2.0}, 1, 3)
    late_means({"compression": hvd.Compression.fp16}, 1, 3)
    late_means({}, 1, 3, dtype=torch.bfloat16)
    pair = hvd.ProcessSet([0, 1])
    hvd.shutdown()
    hvd.init(process_sets=[pair])
    model = make_model(x)
    optimizer = wrap(model, process_set=pair)
    for t in range(3):
        optimizer.zero_grad()
        backward(model, sent(t, rank))
        expected = sum(sent(t - 1, i) for i in range(2)) / 2 if t else np.zeros(COUNT, F)
        if rank == 2:
            expected = sent(t, 2)           # outside the set: no delay
        np.testing.assert_allclose(gradients(model), expected, rtol=1e-5, atol=1e-5)
        optimizer.step()


def test_loops(run_ranks):
    run_ranks(3, loops, env={"BAGUA_DEFAULT_BUCKET_SIZE": "800"}, timeout=100)


def passes_apart():
    """Gradients of two passes that are sent in one step are refused, with zero_grad() between them, too."""
    hvd.init()
    model = make_model(start(0, False))
    optimizer = wrap(model)
    g = [dyadic(9, t) for t in range(6)]
    for clears in (True, False):
        backward(model, g[0])
        if clears:
            optimizer.zero_grad()
        with pytest.raises(ValueError, match="the second backward pass of a step"):
            backward(model, g[1])
        optimizer.zero_grad()
    with optimizer.no_sync():                           # not to be applied
        backward(model, g[2])
    optimizer.zero_grad()
    backward(model, g[3])
    assert not gradients(model).any()                   # the operation in flight was dropped
    optimizer.step()
    optimizer.zero_grad()
    backward(model, g[4])
    assert_same_bits(gradients(model), g[3], "it goes on")
    optimizer.step()


def test_passes_apart(run_ranks):
    run_ranks(2, passes_apart)


def memory():
    """Gradients are not copied where their memory can be swapped; memory that others refer to stays in use."""
    hvd.init()
    x = start(0, False)
    model = torch.nn.ParameterList(torch.nn.Parameter(part) for part in torch.from_numpy(x.copy()).split(100))
    optimizer, at = wrap(model), {}
    for p in model:
        p.register_post_accumulate_grad_hook(lambda p: at.update({p: p.grad.data_ptr()}))
    sent = [np.zeros(COUNT, F)]

    def step(set_to_none=False):
        optimizer.zero_grad(set_to_none=set_to_none)
        before, g = dict(at), dyadic(9, len(sent))
        sum((p * part).sum() for p, part in zip(model, torch.from_numpy(g).split(100), strict=True)).backward()
        assert_same_bits(gradients(model), sent[-1], f"step {len(sent)}")
        sent.append(g)
        optimizer.step()
        return before

    for t in range(6):
        before = step(set_to_none=t < 3)
        assert t == 0 or [p.grad.data_ptr() for p in model] == [before[p] for p in model]
    kept = [p.grad for p in model]
    for _ in range(3):                                  # a list that is read after each step
        before = step()
        assert all(p.grad is tensor for p, tensor in zip(model, kept, strict=True))
    del kept
    step()
    before = step()
    assert [p.grad.data_ptr() for p in model] == [before[p] for p in model]
    everything = torch.zeros(COUNT)                     # p.grad are views of one tensor
    for p, part in zip(model, everything.split(100), strict=True):
        p.grad = part
    del p, part
    for _ in range(3):
        step()
        assert_same_bits(everything.numpy(), sent[-2], "in one tensor")


def test_memory(run_ranks):
    run_ranks(2, memory, env={"BAGUA_DEFAULT_BUCKET_SIZE": "800"})


def unused():
    """A rank uses no parameter: step() sends zeros for it and applies the average of the step before."""
    hvd.init()
    model = make_model(start(0, False))
    optimizer = wrap(model)
    for t in range(4):
        optimizer.zero_grad()
        if hvd.rank() == 0 or t % 2:
            backward(model, dyadic(9, t))
        optimizer.step()
        if t:
            share = 1 if (t - 1) % 2 else 0.5
            np.testing.assert_array_equal(gradients(model), dyadic(9, t - 1) * share, f"step {t}")


def test_unused(run_ranks):
    run_ranks(2, unused)


def sparse():
    hvd.init()
    for as_dense in (True, False):
        embedding = torch.nn.Embedding(6, 2, sparse=True)
        torch.nn.init.ones_(embedding.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), delay=1,
                                             sparse_as_dense=as_dense)

        def rows(t, rank):
            return torch.tensor([t + rank, t])

        for t in range(3):
            optimizer.zero_grad()
            if not as_dense:
                with pytest.raises(ValueError, match="is sparse, which delay=1 cannot serve: pass sparse_as_dense"):
                    embedding(rows(t, hvd.rank())).sum().backward()
                break
            embedding(rows(t, hvd.rank())).sum().backward()
            expected = np.zeros((6, 2), F)
            for rank in range(2):
                np.add.at(expected, rows(t - 1, rank).numpy(), 0.5) if t else None
            assert_same_bits(embedding.weight.grad.to_dense().numpy(), expected, f"step {t}")
            optimizer.step()


def test_sparse(run_ranks):
    run_ranks(2, sparse)


# --------------------------------------------------------------------------------------------- state, ends ----


def checkpoints(algorithm):
    """state_dict() waits for operations in flight, even where other ranks do nothing; training can continue."""
    hvd.init()
    made = algorithms.get(named(algorithm), **({"warmup_steps": 0, "rank": 1} if algorithm == "powersgd" else {}))

    def steps(model, optimizer, which):
        for t in which:
            optimizer.zero_grad()
            backward(model, gradient(hvd.rank(), t, flat(model)))
            optimizer.step()

    model = make_model(start(0, False))
    optimizer = wrap(model, algorithm=made)
    steps(model, optimizer, range(3))
    state = None
    if hvd.rank() == 0:
        state = copy.deepcopy(optimizer.state_dict())
    hvd.barrier()                                       # the other ranks do nothing until rank 0 has saved
    state = copy.deepcopy((model.state_dict(), state or optimizer.state_dict()))
    steps(model, optimizer, range(3, 6))
    other = make_model(np.zeros(COUNT, F))
    resumed = wrap(other, algorithm=copy.deepcopy(made))
    steps(other, resumed, range(7, 9))                  # loading discards this state
    other.load_state_dict(state[0])
    resumed.load_state_dict(state[1])
    steps(other, resumed, range(3, 6))
    assert_same_bits(flat(other), flat(model), "resumed")
    # Without the algorithm's state, gradients are zeros; with rank 0's state on all ranks, averages again.
    resumed.load_state_dict(with_kept(state[1], {}))
    resumed.zero_grad()
    backward(other, gradient(hvd.rank(), 3, flat(other)))
    assert not gradients(other).any()
    hvd.broadcast_optimizer_state(optimizer, 0)
    optimizer.zero_grad()
    backward(model, gradient(hvd.rank(), 6, flat(model)))
    assert gradients(model).any()


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "two_phases", "powersgd", "doublesqueeze"])
def test_checkpoints(run_ranks, algorithm):
    run_ranks(2, checkpoints, arguments={"algorithm": algorithm}, timeout=60)


def new_job():
    """Averages in flight at shutdown are lost on all ranks; the next job begins with zeros."""
    hvd.init()
    model = make_model(start(0, False))
    optimizer = wrap(model, algorithm=TwoPhases())
    for _ in range(2):
        for t in range(3):
            optimizer.zero_grad()
            backward(model, gradient(hvd.rank(), t, flat(model)))
            assert gradients(model).any() == (t > 0)
            optimizer.step()
        hvd.shutdown()
        hvd.init()
    hvd.shutdown()
    optimizer.state_dict()                              # saving after shutdown works


def test_new_job(run_ranks):
    run_ranks(2, new_job, env={"HOROVOD_ELASTIC": "1"}, timeout=60)


def uneven(algorithm):
    """A joined rank contributes zeros, also to averages in flight; afterwards all ranks begin again with zeros."""
    hvd.init()
    model = make_model(start(0, False))
    optimizer = wrap(model, algorithm=named(algorithm))
    for _ in range(2):
        for t in range(2 + hvd.rank()):
            optimizer.zero_grad()
            backward(model, dyadic(9, t))
            if t == 0:
                assert not gradients(model).any()
            elif algorithm == "gradient_allreduce":
                assert_same_bits(gradients(model), dyadic(9, t - 1), f"step {t}")
            optimizer.step()
        hvd.join()
        hvd.broadcast_parameters(model.state_dict(), 1)


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "two_phases"])
def test_uneven(run_ranks, algorithm):
    run_ranks(2, uneven, arguments={"algorithm": algorithm}, timeout=60)


def slow_peer():
    """A step needs no gradients of the same step from other ranks: rank 1 makes them after rank 0 has stepped."""
    hvd.init()
    model = make_model(start(0, False))
    optimizer = wrap(model)
    for t in range(5):
        if t == 3 and hvd.rank() == 1:
            hvd.barrier()                               # rank 0 has stepped
        optimizer.zero_grad()
        backward(model, dyadic(9, t))
        np.testing.assert_array_equal(gradients(model), dyadic(9, max(t - 1, 0)) * (t > 0), f"step {t}")
        optimizer.step()
        if t == 3 and hvd.rank() == 0:
            hvd.barrier()


def test_waits_for_nobody(run_ranks):
    run_ranks(2, slow_peer)


def ends(algorithm):
    """A rank that has done its last step stays for the others' last step."""
    hvd.init()

    def train():
        model = make_model(start(0, False))
        optimizer = wrap(model, algorithm=named(algorithm))
        for t in range(3):
            if t == 2 and hvd.rank() == 1:
                time.sleep(0.5)
            optimizer.zero_grad()
            backward(model, dyadic(9, t))
            optimizer.step()

    train()                                             # drops model and optimizer
    if hvd.rank() == 0:
        hvd.shutdown()


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "two_phases"])
def test_ends(run_ranks, algorithm):
    run_ranks(2, ends, arguments={"algorithm": algorithm})


def dropped(algorithm):
    """Results for deleted optimizers are released before the job ends, and their weights at once."""
    hvd.init()
    kept = []
    for _ in range(4):
        model = make_model(start(0, False))
        optimizer = wrap(model, algorithm=named(algorithm))
        backward(model, dyadic(9, 0))
        optimizer.step()
        kept.append(len(runtime.in_flight))
        weight = weakref.ref(next(model.parameters()))
        del model, optimizer
        hvd.barrier()
        deadline = time.monotonic() + 60
        while not all(sent.finished() for sent in runtime.in_flight):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        gc.collect()
        assert weight() is None
    assert max(kept) == 1, kept


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "two_phases"])
def test_dropped(run_ranks, algorithm):
    run_ranks(2, dropped, arguments={"algorithm": algorithm})


class Looking(Algorithm):
    uses_weights = ("after_step",)

    def communicate(self, bucket, group):
        return algorithms.GradientAllReduce().communicate(bucket, group)


def refusals():
    hvd.init()
    parameter = torch.nn.Parameter(torch.zeros(3))
    sgd = torch.optim.SGD([parameter], lr=0.1)
    late = [ByteGrad, DoubleSqueeze, PowerSGD, TopK, algorithms.Auto,
            algorithms.GradientAllReduce, algorithms.Rotated]
    for name in algorithms.names():
        if type(algorithms.get(name)) in late:
            continue
        with pytest.raises(ValueError, match="delay=1 is for algorithms that communicate gradients in every step"):
            hvd.DistributedOptimizer(sgd, algorithm=name, delay=1)
    for arguments, sentence in (
        ({"algorithm": Looking, "delay": 1}, "which Looking does not: leave out delay, or take another algorithm"),
        ({"op": hvd.Adasum, "delay": 1}, "delay=1 cannot be combined with op=Adasum"),
        *(({"delay": value}, f"delay={value}: expected 0 .* or 1") for value in (2, -1, True, 0.5)),
    ):
        with pytest.raises(ValueError, match=sentence):
            hvd.DistributedOptimizer(sgd, **arguments)


def test_refusals(run_ranks):
    run_ranks(2, refusals)


def buckets_in_any_order():
    """Two-phase operations of several buckets, with another order of gradients on every rank."""
    hvd.init()
    torch.manual_seed(0)
    layers = torch.nn.ModuleList([torch.nn.Linear(12, 12) for _ in range(4)])
    order = list(itertools.permutations(layers))
    optimizer = wrap(layers, lr=0.1, algorithm=PowerSGD(1, 0), groups=[list(layer.parameters()) for layer in layers])
    for t in range(6):
        optimizer.zero_grad()
        x = torch.ones(2, 12)
        for layer in order[(7 * hvd.rank() + t) % len(order)]:
            x = layer(x).tanh()
        x.sum().backward()
        optimizer.step()
    everyone = hvd.allgather(torch.from_numpy(flat(layers))[None])
    assert (everyone == everyone[0]).all()


def test_buckets_in_any_order(run_ranks):
    run_ranks(3, buckets_in_any_order, timeout=60)
