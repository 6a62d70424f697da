"""Every algorithm with every feature of training loops: each combination works, or raises an error with the reason.

All cells of an algorithm run in one job of three ranks, one after the other; a cell that fails ends the job, and
another job runs the cells after it. Expected values are plain torch on all ranks' data: the mean gradient, or this
rank's own for algorithms that leave gradients unchanged; tests/algorithms has the values of lossy codecs.
"""
import copy
import io
import itertools
import os
import traceback
import warnings

import pytest
import torch
from torch import nn

import bagua_hvd.torch as hvd
from bagua_hvd import algorithms
from bagua_hvd.algorithms import ByteGrad, DoubleSqueeze
from bagua_hvd.torch.wrapping import kept_in
from every_algorithm import ADAM, ARGUMENTS, ASYNC, LOCAL
from every_algorithm import NAMES as ALGORITHMS

COARSE = {"doublesqueeze", "rotated", "topk", "powersgd"} | ADAM
# With these, averages need every neighbour: join() is refused, by an error on all ranks that continue.
NO_JOIN = {"low_precision_decentralized", "choco"}
# `make test` runs one cell of each other algorithm.
WHOLE = ("gradient_allreduce", "bytegrad", "decentralized", "async", "qadam", "powersgd")
RANKS = 3
SUBSET = hvd.ProcessSet([0, 2])


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch_of(rank, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 6, generator=generator)


def loss_of(model, batch):
    return model(batch).pow(2).mean()


def wrap(model, algorithm, fused=None, **options):
    options.setdefault("named_parameters", model.named_parameters())
    if isinstance(algorithm, str):
        algorithm = algorithms.get(algorithm, **ARGUMENTS.get(algorithm, {}))
    if algorithm.uses_adam:
        optimizer = hvd.QAdamOptimizer(model.parameters(), lr=0.1, warmup_steps=1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    wrapped = hvd.DistributedOptimizer(optimizer, algorithm=algorithm, **options)
    if algorithm.asynchronous:
        _asynchronous.append(wrapped)
    return wrapped


_asynchronous = []      # optimizers with running rounds; kept, because ranks would collect them at different times
_local = []             # whether the cell's algorithm leaves gradients unchanged


def local_gradients(model, loss):
    """The gradients of loss(model), by plain torch."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():        # deepcopy copies hooks
        parameter._post_accumulate_grad_hooks = None
        parameter._backward_hooks = None
    model.zero_grad()
    value = loss(model)
    if value is not None:
        value.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in model.parameters()]


def mean_gradients(model, losses):
    """The sum of the losses' gradients, divided by the number of losses (one per rank; None: no data).

    For algorithms that leave gradients unchanged, those of this rank's loss.
    """
    if _local[0] and len(losses) > 1:
        losses = [losses[hvd.rank() if len(losses) == RANKS else SUBSET.rank()]]
    lists = [local_gradients(model, loss or (lambda _: None)) for loss in losses]
    return [sum(entries) / len(losses) for entries in zip(*lists, strict=True)]


def batch_losses(*steps, ranks=range(RANKS)):
    """For each rank, the sum of the losses of its batches in some steps."""
    return [lambda m, r=r: sum(loss_of(m, batch_of(r, step)) for step in steps) for r in ranks]


def gradients(model):
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def assert_near(algorithm, actual, expected, **tolerance):
    """Equal up to rounding; for bytegrad, up to two quantizations of a chunk: (max - min) / 510 each."""
    if algorithm in COARSE:
        assert all(a.shape == e.shape and a.to_dense().isfinite().all() for a, e in zip(actual, expected, strict=True))
        return
    if algorithm == "bytegrad":
        tolerance = {"rtol": 0, "atol": max(e.abs().max() for e in expected).item() / 60}
    elif not tolerance:
        tolerance = {"rtol": 1e-4, "atol": 1e-6}
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.to_dense(), e, **tolerance)


def assert_same_everywhere(model, **options):
    while _asynchronous:
        _asynchronous.pop().algorithm.abort()
    if _local[0]:
        hvd.consensus(model, **options)
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyone = hvd.allgather(flat.view(1, -1), name="same", **options)  # sets number unnamed operations separately
    assert torch.isfinite(flat).all()
    assert (everyone == everyone[0]).all()


# -------------------------------------------------------------------------------------------------------- cells ----


def accumulation(algorithm):
    model = make_model()
    opt = wrap(model, algorithm, backward_passes_per_step=2)
    for _ in range(2):
        opt.zero_grad()
        for step in (0, 1):
            loss_of(model, batch_of(hvd.rank(), step)).backward()
        expected = mean_gradients(model, batch_losses(0, 1))        # before weights are averaged
        opt.synchronize()
        assert_near(algorithm, gradients(model), expected)
        if algorithm == "bytegrad":             # the codec is in use
            assert max((g - e).abs().max() / e.abs().max()
                       for g, e in zip(gradients(model), expected, strict=True)) > 1e-4
        with opt.skip_synchronize():
            opt.step()
    opt.zero_grad()
    loss_of(model, batch_of(hvd.rank(), 2)).backward()          # the epoch ends within a window
    expected = mean_gradients(model, batch_losses(2))
    opt.step()
    assert_near(algorithm, gradients(model), expected)
    assert_same_everywhere(model)


def no_sync(algorithm):
    model = make_model()
    opt = wrap(model, algorithm)
    for passes in (3, 1, 2):
        opt.zero_grad()
        mine = [batch_of(hvd.rank(), step) for step in range(passes)]
        sent = opt.reducer.synchronizations
        with opt.no_sync():
            for batch in mine[:-1]:
                loss_of(model, batch).backward()
            local = mean_gradients(model, batch_losses(*range(passes - 1), ranks=[hvd.rank()])) if passes > 1 else []
            assert_near("", gradients(model) if passes > 1 else [], local)
            if passes > 1:
                with pytest.raises(RuntimeError, match=r"within no_sync\(\)"):
                    opt.step()
                opt.reducer.gradient_ready(0)   # has no effect
        assert not opt.reducer.pending and opt.reducer.synchronizations == sent
        loss_of(model, mine[-1]).backward()
        expected = mean_gradients(model, batch_losses(*range(passes)))
        opt.step()
        assert_near(algorithm, gradients(model), expected)
    assert_same_everywhere(model)
    # With windows, gradients from no_sync() are reduced with the window; without a later pass, in step().
    model = make_model()
    opt = wrap(model, algorithm, backward_passes_per_step=2)
    for within, outside in ((1, 2), (2, 0)):
        opt.zero_grad()
        steps = range(within + outside)
        with opt.no_sync():
            for step in steps[:within]:
                loss_of(model, batch_of(hvd.rank(), step)).backward()
        for step in steps[within:]:
            loss_of(model, batch_of(hvd.rank(), step)).backward()
        expected = mean_gradients(model, batch_losses(*steps))
        opt.step()
        assert_near(algorithm, gradients(model), expected)
    assert_same_everywhere(model)
    # A pass after a window adds to its reduced gradients.
    opt.zero_grad()
    expected = mean_gradients(model, batch_losses(0, 1, 2))
    for step in (0, 1):
        loss_of(model, batch_of(hvd.rank(), step)).backward()
    with opt.no_sync():
        loss_of(model, batch_of(hvd.rank(), 2)).backward()
    opt.step()
    assert_near(algorithm, gradients(model), expected)
    assert_same_everywhere(model)


def grad_scaler(algorithm):
    """One element of a small gradient overflows on one rank: all ranks skip the step and lower the scale."""
    for way in ("step", "unscale", "classical", "fused"):
        if way == "fused" and algorithm in ADAM:
            continue                            # an error: tests/algorithms/test_refusals.py
        model = make_model()
        opt = wrap(model, algorithm, groups=[[model[2].bias]], fused=way == "fused" or None)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        poison = torch.zeros(3)
        model[2].bias.register_hook(lambda gradient, poison=poison: gradient + poison)
        for step, value in enumerate((0.0, float("inf"), 0.0, float("nan"), 0.0)):
            poison[1] = value if hvd.rank() == 1 else 0.0
            before = copy.deepcopy(model.state_dict())
            opt.zero_grad()
            scaler.scale(loss_of(model, batch_of(hvd.rank(), step))).backward()
            expected = mean_gradients(model, batch_losses(step))
            sent = opt.reducer.synchronizations
            assert opt.param_groups[0]["lr"] == 0.1 and opt.reducer.synchronizations == sent
            if way in ("step", "fused"):        # a fused optimizer unscales and skips by itself
                scaler.step(opt)
            elif way == "unscale":
                scaler.unscale_(opt)
                if not value:
                    assert_near(algorithm, gradients(model), expected)
                hvd.clip_grad_norm_(opt, 100.0)
                scaler.step(opt)
            else:
                opt.synchronize()
                scaler.unscale_(opt)
                with opt.skip_synchronize():
                    scaler.step(opt)
            scaler.update()
            same = all((before[name] == value).all() for name, value in model.state_dict().items())
            skipped = value and (algorithm not in ASYNC or hvd.rank() == 1)
            # Averages of weights are made also in skipped steps; those after the step only if step() was called.
            averaged = algorithm == "decentralized" or way == "fused" and algorithm in LOCAL
            assert same == bool(skipped) or skipped and averaged
            if not value and way != "fused":
                assert_near(algorithm, gradients(model), expected)
        assert scaler.get_scale() == (256.0 if algorithm not in ASYNC or hvd.rank() == 1 else 1024.0)
        assert_same_everywhere(model)


def bf16_autocast(algorithm):
    def losses(step):
        def loss(model, rank):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return loss_of(model, batch_of(rank, step).to(next(model.parameters()).dtype))

        return [lambda m, r=r: loss(m, r) for r in range(RANKS)]

    for dtype in (torch.float32, torch.bfloat16):
        model = make_model().to(dtype)
        opt = wrap(model, algorithm)
        for step in range(2):
            opt.zero_grad()
            expected = mean_gradients(model, losses(step))
            losses(step)[hvd.rank()](model).backward()
            opt.step()
            assert all(gradient.dtype == dtype for gradient in gradients(model))
            coarse = {"rtol": 2e-2, "atol": 2e-3} if dtype == torch.bfloat16 else {}
            assert_near(algorithm, gradients(model), expected, **coarse)
        assert_same_everywhere(model.float())


def clipping(algorithm):
    for way in ("classical", "optimizer", "after synchronize", "parameters"):
        model = make_model()
        opt = wrap(model, algorithm)
        for step, norm_type in enumerate((2.0, float("inf"))):
            opt.zero_grad()
            loss_of(model, batch_of(hvd.rank(), step)).backward()
            clipped = [nn.Parameter(torch.zeros_like(p)) for p in model.parameters()]
            for parameter, gradient in zip(clipped, mean_gradients(model, batch_losses(step)), strict=True):
                parameter.grad = gradient
            total = nn.utils.clip_grad_norm_(clipped, 0.05, norm_type)
            assert total > 0.05
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                if way == "classical":
                    opt.synchronize()
                    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)
                    with opt.skip_synchronize():
                        opt.step()
                elif way == "parameters":
                    opt.synchronize()
                    norm = hvd.clip_grad_norm_(model.parameters(), 0.05, norm_type)
                    with opt.skip_synchronize():
                        opt.step()
                else:
                    if way == "after synchronize":
                        opt.synchronize()
                    sent = opt.reducer.synchronizations
                    norm = hvd.clip_grad_norm_(opt, 0.05, norm_type=norm_type)
                    opt.step()
                    assert opt.reducer.synchronizations == sent     # backward() has synchronized
            if algorithm not in COARSE:
                torch.testing.assert_close(norm, total, rtol=0.05, atol=0)
            assert_near(algorithm, gradients(model), [parameter.grad for parameter in clipped])
        assert_same_everywhere(model)
    opt.zero_grad()
    (loss_of(model, batch_of(hvd.rank())) * (float("nan") if hvd.rank() == 1 else 1)).backward()
    stay = _local[0] or algorithm in ADAM
    if hvd.rank() == 1 or not stay:
        with pytest.raises(RuntimeError, match="non-finite"):
            hvd.clip_grad_norm_(opt, 1.0, error_if_nonfinite=True)
    else:                                       # a NaN stays on its rank
        hvd.clip_grad_norm_(opt, 1.0, error_if_nonfinite=True)


def two_optimizers(algorithm):
    """A GAN: the generator's loss goes through the discriminator, and two losses make one discriminator step."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    opt_g, opt_d = wrap(generator, algorithm), wrap(discriminator, algorithm)

    def noise(step, rank=None):
        return batch_of(hvd.rank() if rank is None else rank, step)[:, :4]

    for step, way in enumerate(("no_sync", "frozen", "synchronize", "no_sync")):
        opt_d.zero_grad()
        with opt_d.no_sync():
            discriminator(batch_of(hvd.rank(), step)).mean().backward()
        (-discriminator(generator(noise(step)).detach()).mean()).backward()
        fakes = [generator(noise(step, rank)).detach() for rank in range(RANKS)]
        expected = mean_gradients(discriminator, [
            lambda d, r=r, s=step, f=fakes: d(batch_of(r, s)).mean() - d(f[r]).mean() for r in range(RANKS)
        ])
        opt_d.step()
        assert_near(algorithm, gradients(discriminator), expected)
        opt_g.zero_grad()
        opt_d.zero_grad()
        if way == "no_sync":
            with opt_d.no_sync():
                discriminator(generator(noise(step))).mean().backward()
        else:
            discriminator.requires_grad_(way != "frozen")
            discriminator(generator(noise(step))).mean().backward()
            discriminator.requires_grad_(True)
        frozen = copy.deepcopy(discriminator).requires_grad_(False)
        expected = mean_gradients(generator, [
            lambda g, r=r, s=step, d=frozen: d(g(noise(s, r))).mean() for r in range(RANKS)
        ])
        opt_g.step()
        assert_near(algorithm, gradients(generator), expected)
        if way == "synchronize":                # as in Horovod's scripts
            opt_d.synchronize()
    assert_same_everywhere(nn.ModuleList([generator, discriminator]))


def unused_parameters(algorithm):
    torch.manual_seed(0)
    branches = nn.ModuleList([nn.Linear(3, 2) for _ in range(RANKS + 1)])
    opt = wrap(branches, algorithm)
    for step in range(3):
        used = (hvd.rank() + step) % RANKS      # never the last branch
        opt.zero_grad()
        branches[used](torch.ones(1, 3) * (hvd.rank() + 1)).sum().backward()
        expected = mean_gradients(branches, [
            lambda b, r=r, s=step: b[(r + s) % RANKS](torch.ones(1, 3) * (r + 1)).sum() for r in range(RANKS)
        ])
        opt.step()
        assert_near(algorithm, gradients(branches), expected)
    assert_same_everywhere(branches)


def uneven_data_with_join(algorithm):
    """Joined ranks count as zeros in a mean over all, also if they have not made a step."""
    if algorithm in ASYNC:                      # these use abort() instead of join()
        opt = wrap(model := make_model(), algorithm)
        for step in range(1 + 3 * hvd.rank()):
            opt.zero_grad()
            loss_of(model, batch_of(hvd.rank(), step)).backward()
            opt.step()
        assert_same_everywhere(model)
        return
    if algorithm in NO_JOIN:
        opt = wrap(model := make_model(), algorithm)
        if hvd.rank() != 1:
            with pytest.raises(hvd.HorovodInternalError, match="not supported with Join"):
                for step in range(5):
                    opt.zero_grad()
                    loss_of(model, batch_of(hvd.rank(), step)).backward()
                    opt.step()
        hvd.join()
        return
    for batches in ((1, 2, 3), (0, 2, 1)):
        model = make_model()
        opt = wrap(model, algorithm)
        for step in range(batches[hvd.rank()]):
            opt.zero_grad()
            loss_of(model, batch_of(hvd.rank(), step)).backward()
            losses = batch_losses(step)
            expected = mean_gradients(model, [losses[r] if step < batches[r] else None for r in range(RANKS)])
            opt.step()
            assert_near(algorithm, gradients(model), expected)
        last = hvd.join()
        assert last == batches.index(max(batches)) or _local[0]     # local steps do not wait for other ranks
        hvd.broadcast_parameters(model.state_dict(), last)
        hvd.broadcast_optimizer_state(opt, last)
        for step in (5, 6):                     # the next epoch
            opt.zero_grad()
            loss_of(model, batch_of(hvd.rank(), step)).backward()
            expected = mean_gradients(model, batch_losses(step))
            opt.step()
            assert_near(algorithm, gradients(model), expected)
        assert_same_everywhere(model)


    if _local[0] or algorithm in ADAM:
        return
    # A joined rank cannot take part in gathering rows of sparse gradients: the step raises an error.
    model = nn.Embedding(7, 2, sparse=True)
    opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), algorithm=algorithm)
    if hvd.rank() != 1:
        with pytest.raises(hvd.HorovodInternalError, match="not supported with Join"):
            model(torch.tensor([1])).sum().backward()
    hvd.join()


def checkpoint_and_resume(algorithm):
    """Bit for bit equal to uninterrupted training."""
    def train(model, opt, steps):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore")
            warnings.filterwarnings("error", "the error feedback of")       # an unused error feedback is a failure
            for step in steps:
                opt.zero_grad()
                batch = batch_of(hvd.rank(), step)
                if isinstance(model[0], nn.Embedding):
                    batch = batch[0].abs().mul(3).long().clamp(max=8)
                loss_of(model, batch).backward()
                opt.step()

    def make_sparse(seed=0):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Linear(6, 4))

    relaxed = {"bytegrad": ("bytegrad", ByteGrad(error_feedback=True)),
               "doublesqueeze": ("doublesqueeze", DoubleSqueeze(momentum=0.5, warmup_steps=1))}
    makers = (make_model,) if algorithm in ADAM else (make_model, make_sparse)
    for chosen, make in itertools.product(relaxed.get(algorithm, (algorithm,)), makers):
        whole = make()
        opt = wrap(whole, chosen)
        train(whole, opt, range(5))
        half = make()
        opt = wrap(half, chosen)
        train(half, opt, range(2))
        file = io.BytesIO()
        torch.save({"model": half.state_dict(), "optimizer": opt.state_dict()}, file)
        if algorithm in ADAM:
            base = hvd.QAdamOptimizer(half.parameters(), lr=0.1).state_dict()
        else:
            base = torch.optim.SGD(half.parameters(), lr=0.1, momentum=0.9).state_dict()
        own = opt.state_dict()
        assert own.keys() == base.keys()
        assert bool(kept_in(own)) == (chosen not in ("auto", "gradient_allreduce", "bytegrad"))
        own["param_groups"][0].pop("bagua_hvd", None)
        assert own["param_groups"] == base["param_groups"]
        file.seek(0)
        state = torch.load(file)
        resumed = make(seed=1)
        opt = wrap(resumed, chosen)
        resumed.load_state_dict(state["model"])
        opt.load_state_dict(state["optimizer"])
        train(resumed, opt, range(2, 5))
        for a, b in zip(resumed.parameters(), whole.parameters(), strict=True):
            assert (a == b).all() or algorithm in ASYNC         # their rounds depend on timing
        assert_same_everywhere(resumed)
        # A plain optimizer can load the checkpoint, too.
        if algorithm not in ADAM:
            torch.optim.SGD(half.parameters(), lr=1).load_state_dict(state["optimizer"])


def sparse_embeddings(algorithm):
    """Rows are gathered, or sent dense; ranks may use the embedding or not, from the first step on."""
    def loss(model, rows):
        if not rows:
            return model["linear"](torch.ones(1, 2)).sum()
        return model["linear"](model["embedding"](torch.tensor(rows))).sum()

    if algorithm in ADAM:
        model = nn.ModuleDict({"embedding": nn.Embedding(7, 2, sparse=True), "linear": nn.Linear(2, 1)})
        opt = wrap(model, algorithm)
        with pytest.raises(ValueError, match=r"gradient of embedding.weight is sparse, which \w+ cannot serve"):
            loss(model, [0] if hvd.rank() else []).backward()
        return
    first = ([[], [1, 1, 2], []], [[0], [], [0]], [[], [], []], [[3], [4], [5]])
    late = ([[], [], []], *first)               # unused in the first step, so it is sent dense from then on
    for sparse_as_dense, steps in ((False, first), (True, first), (False, late)):
        torch.manual_seed(0)
        model = nn.ModuleDict({"embedding": nn.Embedding(7, 2, sparse=True), "linear": nn.Linear(2, 1)})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")     # the warning about gathered rows
            warnings.filterwarnings("error", "Sparse invariant")
            opt = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), sparse_as_dense=sparse_as_dense,
                algorithm=algorithms.get(algorithm, **ARGUMENTS.get(algorithm, {})),
            )
            _asynchronous.extend([opt] if algorithm in ASYNC else [])
            for rows in steps:
                opt.zero_grad()
                loss(model, rows[hvd.rank()]).backward()
                expected = mean_gradients(model, [lambda m, r=r: loss(m, r) for r in rows])
                hvd.clip_grad_norm_(opt, 1e6)
                opt.step()
                assert_near(algorithm, gradients(model), expected)
                gradient = model["embedding"].weight.grad
                assert gradient.is_sparse if gradient is not None and steps is not late else True
        assert_same_everywhere(model)


def process_set(algorithm):
    model = make_model()
    opt = wrap(model, algorithm, process_set=SUBSET)
    members = (0, 2) if hvd.rank() in (0, 2) else (1,)
    for step in range(2):
        opt.zero_grad()
        loss_of(model, batch_of(hvd.rank(), step)).backward()
        expected = mean_gradients(model, batch_losses(step, ranks=members))
        with opt.no_sync():
            pass
        hvd.clip_grad_norm_(opt, 1e6)
        opt.step()
        assert_near(algorithm if SUBSET.included() else "", gradients(model), expected)
    if SUBSET.included():
        assert_same_everywhere(model, process_set=SUBSET)


def infinities(algorithm):
    """All ranks see a NaN gradient of one rank; if gradients stay local, at least its own model has it."""
    for value in (float("nan"), float("inf")):
        for steps in (1, 3):                    # within a warm-up and after it
            model = make_model()
            opt = wrap(model, algorithm)
            for step in range(steps):
                opt.zero_grad()
                factor = value if (hvd.rank(), step) == (1, steps - 1) else 1
                (loss_of(model, batch_of(hvd.rank(), step)) * factor).backward()
                opt.step()
            finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
            assert not finite or hvd.rank() != 1 and _local[0]


def kinds_of_parameters(algorithm):
    """Other dtypes and layouts, 0-d and empty, frozen, without gradient on some ranks, added later."""
    torch.manual_seed(0)
    dtypes = {"half_": torch.float16, "brain_": torch.bfloat16, "wide_": torch.float64}
    model = nn.ModuleDict({
        **{name: nn.Linear(3, 2).to(dtype) for name, dtype in dtypes.items()},
        "conv": nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last),
        "frozen": nn.Linear(3, 2).requires_grad_(False), "some": nn.Linear(3, 2), "late": nn.Linear(3, 2),
        "odd": nn.ParameterDict({"scalar": nn.Parameter(torch.ones(())), "empty": nn.Parameter(torch.empty(0, 3))}),
    })
    parameters = [p for name, module in model.items() if name != "late" for p in module.parameters()]
    kind = hvd.QAdamOptimizer if algorithm in ADAM else torch.optim.SGD
    arguments = {"warmup_steps": 3} if algorithm in ADAM else {"momentum": 0.9}
    opt = hvd.DistributedOptimizer(kind(parameters, lr=0.01, **arguments),
                                   algorithm=algorithms.get(algorithm, **ARGUMENTS.get(algorithm, {})))
    _asynchronous.extend([opt] if algorithm in ASYNC else [])
    before = copy.deepcopy(model.state_dict())
    for step in range(6):
        opt.zero_grad(set_to_none=step % 2 == 0)
        x = batch_of(hvd.rank(), step)[:, :3]
        loss = sum(model[name](x.to(next(model[name].parameters()).dtype)).float().pow(2).mean()
                   for name in (*dtypes, "frozen", *["some"] * (hvd.rank() > 0)))
        loss = loss + model["odd"]["scalar"] ** 2 + model["odd"]["empty"].sum() + model["late"](x).pow(2).mean()
        loss = loss + model["conv"](torch.ones(1, 3, 4, 4) * (1 + hvd.rank())).pow(2).mean()
        loss.backward()
        opt.step()
        if step == 1:
            for optimizer in _asynchronous:
                optimizer.algorithm.abort()     # rounds need equal buckets on all ranks
            opt.add_param_group({"params": list(model["late"].parameters())})
            for optimizer in _asynchronous:
                optimizer.algorithm.resume()
    for name, value in model.state_dict().items():
        assert value.isfinite().all() and value.dtype == before[name].dtype and value.stride() == before[name].stride()
        same = bool((value == before[name]).all())
        if name.startswith("frozen") or algorithm not in COARSE and value.numel():
            assert same == name.startswith("frozen"), name
    assert_same_everywhere(model.double())


def closures(algorithm):
    model = make_model()
    opt = wrap(model, algorithm)

    def closure():
        opt.zero_grad()
        loss = loss_of(model, batch_of(hvd.rank()))
        loss.backward()
        return loss

    twin = make_model()
    plain = wrap(twin, algorithm)
    for _ in range(4):
        loss = opt.step(closure).item()
        plain.zero_grad()
        twin_loss = loss_of(twin, batch_of(hvd.rank()))
        twin_loss.backward()
        plain.step()
        assert loss == twin_loss.item() or algorithm in ASYNC       # its rounds depend on timing
    assert_same_everywhere(model)


def one_step_late(algorithm):
    """delay=1 applies the averages of the step before, with windows, a changing loss scale, and clipping."""
    model = make_model()
    if algorithm in LOCAL or algorithm in ADAM:
        with pytest.raises(ValueError, match="delay=1 is for algorithms that communicate gradients in every step"):
            wrap(model, algorithm, delay=1)
        return
    opt = wrap(model, algorithm, backward_passes_per_step=2, delay=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    arrived = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(4):
        opt.zero_grad()
        for batch in (2 * step, 2 * step + 1):
            scaler.scale(loss_of(model, batch_of(hvd.rank(), batch))).backward()
        sent = mean_gradients(model, batch_losses(2 * step, 2 * step + 1))
        scaler.unscale_(opt)
        assert_near(algorithm, gradients(model), arrived)
        hvd.clip_grad_norm_(opt, 0.05)
        scaler.step(opt)
        scaler.update()
        arrived = sent
    assert scaler.get_scale() == 1024.0 * 2**4
    assert_same_everywhere(model)


def checkpoint_of_one_rank(algorithm):
    """All ranks load rank 0's checkpoint by broadcast, during training: state of a single rank begins anew."""
    model = make_model()
    opt = wrap(model, algorithm)
    for step in range(8):
        opt.zero_grad()
        loss_of(model, batch_of(hvd.rank(), step)).backward()
        opt.step()
        if step == 3:
            if algorithm in ASYNC:
                opt.algorithm.abort()
            state = copy.deepcopy((model.state_dict(), opt.state_dict()))
            if hvd.rank() == 0:
                model.load_state_dict(state[0])
            hvd.broadcast_parameters(model.state_dict(), 0)
            hvd.broadcast_optimizer_state(opt, 0)
            if algorithm in ASYNC:
                opt.algorithm.resume()
    if algorithm in ("low_precision_decentralized", "choco"):
        replicas = opt.reducer.model.weights[0].state["replicas"]
        kept = torch.stack([torch.from_numpy(array) for array in (replicas.own, replicas.left, replicas.right)])
        every = hvd.allgather(kept[None], name="replicas")
        # The ranks of a host have equal replicas, and a single host is its own neighbour.
        left, right = (0, 0) if opt.algorithm.hierarchical else (-1, 1)
        assert (every[hvd.rank(), 1] == every[(hvd.rank() + left) % RANKS, 0]).all()
        assert (every[hvd.rank(), 2] == every[(hvd.rank() + right) % RANKS, 0]).all()
    assert_same_everywhere(model)


CELLS = (accumulation, no_sync, grad_scaler, bf16_autocast, clipping, two_optimizers, unused_parameters,
         uneven_data_with_join, checkpoint_and_resume, sparse_embeddings, process_set, infinities, kinds_of_parameters,
         closures, one_step_late, checkpoint_of_one_rank)

# ---------------------------------------------------------------------------------------------------------- job ----


def run_cells(algorithm, names):
    hvd.init(process_sets=[SUBSET])
    _local[:] = [algorithm in LOCAL]
    for cell in (cell for cell in CELLS if cell.__name__ in names):
        try:
            cell(algorithm)
            while _asynchronous:
                _asynchronous.pop().algorithm.abort()
            hvd.barrier()
        except BaseException:
            print(f"CELL {cell.__name__} failed\n{traceback.format_exc()}", flush=True)
            os._exit(1)                         # the other ranks notice the loss
        print(f"CELL {cell.__name__} ok", flush=True)


_outcomes = {}      # (algorithm, cell) -> the output of all ranks, or None if the cell passed


def _run_job(run_ranks, algorithm, names):
    while names:
        results = run_ranks(RANKS, run_cells, arguments={"algorithm": algorithm, "names": names}, check=False,
                            timeout=110)
        done = min(result.output.count(" ok\n") for result in results)
        for name in names[:done]:
            _outcomes[algorithm, name] = None
        if done < len(names):
            _outcomes[algorithm, names[done]] = "\n".join(
                f"--- rank {rank}\n{result.output}" for rank, result in enumerate(results)
            )
        names = names[done + 1:]


@pytest.mark.parametrize("algorithm, cell", [
    pytest.param(algorithm, cell.__name__,
                 marks=[] if algorithm in WHOLE or number % len(CELLS) == place else [pytest.mark.long])
    for number, algorithm in enumerate(ALGORITHMS) for place, cell in enumerate(CELLS)])
def test_matrix(run_ranks, request, algorithm, cell):
    if (algorithm, cell) not in _outcomes:
        chosen = [item.callspec.params for item in request.session.items if item.originalname == "test_matrix"]
        _run_job(run_ranks, algorithm, [each["cell"] for each in chosen if each["algorithm"] == algorithm])
    outcome = _outcomes[algorithm, cell]
    if outcome is not None:
        pytest.fail(outcome, pytrace=False)
