"""backward() leaves reduced gradients, for every kind of pass and every change of gradients before the step."""
import itertools
import os
import threading
import warnings
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bagua_hvd.torch as hvd
from bagua_hvd import algorithms
from bagua_hvd.torch.backward import Backward

SMALL_BUCKETS = {"BAGUA_DEFAULT_BUCKET_SIZE": "1048576"}


def wrap(model, lr=0.1, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), model.named_parameters(), **options)


def flat(tensors):
    return torch.cat([torch.zeros(0), *(tensor.detach().to_dense().flatten() for tensor in tensors)])


def gradient(model):
    return flat([p.grad for p in model.parameters()])


def assert_same_everywhere(model, name="same"):
    everyone = hvd.allgather(flat(model.parameters())[None], name=name)
    assert (everyone == everyone[0]).all()


def mean_of(value):
    """The mean over the ranks of the function's value for a rank, computed locally."""
    return sum(value(rank) for rank in range(hvd.size())) / hvd.size()


# ------------------------------------------------------------------------------- changes before the step ----


def clipping_without_synchronize():
    """Clipping as in DDP scripts, with gradients that take a while: clipping once changed gradients in flight."""
    hvd.init()
    torch.manual_seed(0)
    width = 768
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(6)])
    opt = wrap(model, lr=1e-3)
    for step in range(60):
        torch.manual_seed(100 * step + hvd.rank())
        opt.zero_grad()
        model(torch.randn(2, width)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        opt.step()
    assert_same_everywhere(model)


def test_clipping_without_synchronize(run_ranks):
    run_ranks(2, clipping_without_synchronize, env=SMALL_BUCKETS)


def reduced_after_backward():
    """Gradients are reduced after backward(), for clipping and logging; also of parameters unused on this rank."""
    hvd.init()
    torch.manual_seed(0)
    branches = nn.ModuleList([nn.Linear(3, 2) for _ in range(hvd.size() + 1)])
    opt = wrap(branches)
    start = flat(branches.parameters())
    for step in range(3):
        opt.zero_grad()
        branches[(hvd.rank() + step) % hvd.size()](torch.ones(1, 3)).sum().backward()
        assert torch.equal(gradient(branches), torch.tensor([1.0 / hvd.size()] * 8 * hvd.size() + [0.0] * 8))
        assert not opt.reducer.pending and opt.reducer.synchronized
        nn.utils.clip_grad_value_(branches.parameters(), 0.25)
        sent = opt.reducer.synchronizations
        opt.step()
        assert opt.reducer.synchronizations == sent
    moved = torch.tensor([3 * 0.1 * 0.25] * 8 * hvd.size() + [0.0] * 8)
    torch.testing.assert_close(start - flat(branches.parameters()), moved)
    # A rank without a batch sends zeros in step().
    opt.zero_grad()
    if hvd.rank() == 0:
        branches[0](torch.ones(1, 3)).sum().backward()
    opt.step()
    assert_same_everywhere(branches)
    torch.testing.assert_close(branches[0].bias.grad, torch.full((2,), 1 / hvd.size()))
    # Reduced gradients may be discarded.
    branches[0](torch.ones(1, 3)).sum().backward()
    opt.zero_grad()
    branches[1](torch.ones(1, 3)).sum().backward()
    torch.testing.assert_close(branches[1].bias.grad, torch.ones(2))
    opt.step()
    assert_same_everywhere(branches)
    if hasattr(torch.Tensor, "grad_dtype"):     # gradients in more precision than the weights
        half = nn.Linear(3, 2, dtype=torch.bfloat16)
        half.weight.grad_dtype = torch.float32
        opt = wrap(half)
        for rank in range(hvd.size()):          # the other ranks send zeros
            opt.zero_grad()
            if hvd.rank() == rank:
                half(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
            opt.step()
            torch.testing.assert_close(half.weight.grad, torch.full((2, 3), 1 / hvd.size()))


@pytest.mark.parametrize("n", [2, 3])
def test_reduced_after_backward(run_ranks, n):
    run_ranks(n, reduced_after_backward)


def several_passes():
    """Passes before a step: sums of averages; also with op=Sum, sparse gradients, and codecs."""
    hvd.init()
    rank = hvd.rank()
    for options in ({}, {"op": hvd.Sum}, {"backward_passes_per_step": 2}, {"op": hvd.Sum, "groups": 1},
                    {"algorithm": "bytegrad"}, {"compression": hvd.Compression.fp16}):
        times = hvd.size() if options.get("op") == hvd.Sum else 1
        model = nn.Linear(3, 2)
        hvd.broadcast_parameters(model.state_dict(), 0)
        opt = wrap(model, **options)
        for _ in range(3):
            opt.zero_grad()
            loss = model(torch.full((1, 3), rank + 1.0)).sum()
            for passes in range(1, 5):
                loss.backward(retain_graph=True)
                if passes % options.get("backward_passes_per_step", 1) == 0:
                    mean = (hvd.size() + 1) / 2
                    expected = torch.tensor([passes * mean] * 6 + [float(passes)] * 2) * times
                    torch.testing.assert_close(gradient(model), expected, rtol=0.02, atol=0)
            opt.step()
        assert_same_everywhere(model, f"{options}")
    for op in (hvd.Average, hvd.Sum):
        times = hvd.size() if op == hvd.Sum else 1
        rows = nn.Embedding(5, 2, sparse=True)
        opt = hvd.DistributedOptimizer(torch.optim.SGD(rows.parameters(), lr=0.1), op=op)
        for passes in (1, 2, 3):
            rows(torch.tensor([rank])).sum().backward()
            assert rows.weight.grad.is_sparse
            expected = torch.zeros(5, 2)
            expected[:hvd.size()] = passes / hvd.size() * times
            torch.testing.assert_close(rows.weight.grad.to_dense(), expected)
        opt.step()


def test_several_passes(run_ranks):
    run_ranks(2, several_passes)


def gradients_taken_between_backward_and_step():
    """torch.autograd.grad() does not change `p.grad`: sums stay, and placeholder zeros are replaced later."""
    hvd.init()
    rank, n = hvd.rank(), hvd.size()
    p, rows = nn.Parameter(torch.ones(3)), nn.Embedding(4, 2, sparse=True)
    opt = hvd.DistributedOptimizer(torch.optim.SGD([p, *rows.parameters()], lr=1.0), op=hvd.Sum)
    torch.autograd.grad((p ** 2).sum() + rows(torch.tensor([0])).sum(), [p, rows.weight])
    (p * (rank + 1) + rows(torch.tensor([1])).sum()).sum().backward()
    total = n * (n + 1) / 2
    if rank == 0:
        torch.autograd.grad((p ** 2).sum(), [p])
    assert torch.equal(p.grad, torch.full((3,), total)) and rows.weight.grad.is_sparse
    opt.step()
    torch.testing.assert_close(p.detach(), torch.full((3,), 1 - total))


def test_gradients_taken_between_backward_and_step(run_ranks):
    run_ranks(2, gradients_taken_between_backward_and_step)


def sums_whose_tensors_are_written_again():
    """Gradients that scripts write without backward() are this rank's gradients, with or without zero_grad()."""
    hvd.init()
    for clears in (True, False):
        p = nn.Parameter(torch.zeros(4))
        opt = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)], op=hvd.Sum)
        p.grad = torch.empty(4)
        for _ in range(3):
            p.grad.copy_(torch.full((4,), hvd.rank() + 1.0))
            opt.step()
            assert torch.equal(p.grad, torch.full((4,), hvd.size() * (hvd.size() + 1) / 2))
            if clears:
                opt.zero_grad(set_to_none=False)


def test_sums_whose_tensors_are_written_again(run_ranks):
    run_ranks(2, sums_whose_tensors_are_written_again)


def clipped_sums_that_are_kept():
    """Without zero_grad(), a rank without a batch sends its share of the clipped sum, as the others do."""
    hvd.init()
    p = nn.Parameter(torch.zeros(2))
    opt = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=hvd.Sum)
    p.sum().backward()
    opt.synchronize()
    p.grad.mul_(0.5)
    with opt.skip_synchronize():
        opt.step()
    if hvd.rank() == 0:
        p.sum().backward()
    opt.step()
    assert torch.equal(p.grad, torch.full((2,), 0.5 * hvd.size() + 1))


def test_clipped_sums_that_are_kept(run_ranks):
    run_ranks(2, clipped_sums_that_are_kept)


def sums_and_the_variance_of_adam():
    """If full steps set Adam's variance from gradients that the optimizer sees, these gradients stay unchanged."""
    hvd.init()
    for algorithm in (hvd.algorithms.TopK(ratio=1.0, average=False, full_steps=3), hvd.algorithms.DoubleSqueeze(
            codec=hvd.algorithms.ByteGrad().codec, average=False, full_steps=3)):
        p = nn.Parameter(torch.zeros(64))
        opt = hvd.DistributedOptimizer(torch.optim.Adam([p], lr=0.1), op=hvd.Sum, algorithm=algorithm)
        for _ in range(6):
            opt.zero_grad()
            (p * (hvd.rank() + 1)).sum().backward()
            reduced, before = p.grad.clone(), p.detach().clone()
            opt.step()
            assert torch.equal(p.grad, reduced)
            torch.testing.assert_close(before - p.detach(), torch.full((64,), 0.1), rtol=1e-3, atol=0)


def test_sums_and_the_variance_of_adam(run_ranks):
    run_ranks(2, sums_and_the_variance_of_adam)


def first_touched_in_the_second_pass():
    """In the second pass, the gradient that began as zeros holds the contributions of other ranks."""
    hvd.init()
    for op in (hvd.Average, hvd.Sum):
        a, b = (nn.Parameter(torch.ones(3)) for _ in "ab")
        opt = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0), named_parameters=[("a", a), ("b", b)], op=op)
        (a.sum() + (b * 10).sum() if hvd.rank() == 0 else a.sum()).backward()
        (a.sum() + (b * 2).sum()).backward()
        assert torch.equal(b.grad, torch.full((3,), (10 / hvd.size() + 2) * (hvd.size() if op == hvd.Sum else 1)))
        opt.step()


def test_first_touched_in_the_second_pass(run_ranks):
    run_ranks(2, first_touched_in_the_second_pass)


def one_parameter_in_two_optimizers():
    hvd.init()
    p, q, shared = (nn.Parameter(torch.zeros(5)) for _ in range(3))
    base = torch.optim.SGD([shared], lr=1.0)

    def loss():
        return (p.sum() + q.sum() + shared.sum()) * (hvd.rank() + 1)

    for first, second in ((torch.optim.SGD([p, shared], lr=1.0), torch.optim.SGD([q, shared], lr=1.0)), (base, base)):
        one, other = hvd.DistributedOptimizer(first), hvd.DistributedOptimizer(second)
        with pytest.raises(ValueError, match=r"noname.0.\d is in two DistributedOptimizers, and both would reduce"):
            loss().backward()
        for each in (one, other):
            each.reducer.reset()
            each.zero_grad()
        with other.no_sync():
            loss().backward()
        assert torch.equal(shared.grad, torch.full((5,), (hvd.size() + 1) / 2))
        # A replaced optimizer no longer counts, even before the garbage collection.
        other.cycle = other
        del other, each
        one.zero_grad()
        loss().backward()
        assert torch.equal(shared.grad, torch.full((5,), (hvd.size() + 1) / 2))
        one.step()
        del one


def test_one_parameter_in_two_optimizers(run_ranks):
    run_ranks(2, one_parameter_in_two_optimizers)


def hooks_of_the_user():
    """Hooks that take gradients run after ours, hooks that change gradients before ours; others are errors."""
    hvd.init()
    rank = hvd.rank()

    def steps(after):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        names = {parameter: name for name, parameter in model.named_parameters()}
        own = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in names}

        def step(parameter):
            own[parameter].step()
            own[parameter].zero_grad()

        for wraps in (True, False) if after else (False, True):
            for parameter, name in names.items():
                if wraps:
                    own[parameter] = hvd.DistributedOptimizer(own[parameter], [(name, parameter)])
                else:
                    parameter.register_post_accumulate_grad_hook(step)
        torch.manual_seed(rank)
        for _ in range(3):
            model(torch.randn(5, 3)).square().mean().backward()
        assert_same_everywhere(model)

    steps(after=True)
    with pytest.raises(RuntimeError, match=r"a hook on 2\.(weight|bias) has set its gradient to None"):
        steps(after=False)

    def halves(parameter):
        parameter.grad.mul_(0.5)

    def replaces(parameter):
        parameter.grad = parameter.grad * 0.5

    for hook, untouched in itertools.product((halves, replaces), (False, True)):
        for before in (True, False):
            p, q = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
            if before:
                p.register_post_accumulate_grad_hook(hook)
            opt = hvd.DistributedOptimizer(torch.optim.SGD([q, p], lr=0.1), gradients_untouched=untouched)
            for step in range(4):
                if step == 2 and not before and not untouched:
                    p.register_post_accumulate_grad_hook(hook)
                opt.zero_grad()
                loss = (p.sum() + q.sum()) * (2.0 + 2 * rank)
                wrong = step > 1 and not before
                if not wrong:
                    loss.backward()
                    opt.step()
                    assert torch.equal(p.grad, torch.full((3,), mean_of(lambda r: 1.0 + r) * (2 - before)))
                    continue
                with pytest.raises(RuntimeError, match=r"noname\.0\.1 was changed while it was averaged"):
                    loss.backward()
                    if untouched:
                        hook(p)
                    opt.step()


def test_hooks_of_the_user(run_ranks):
    run_ranks(2, hooks_of_the_user)


class Positions(nn.Module):
    """The gradient of the layers' output is p.grad of the positions: autograd does not copy it for a batch of one."""

    def __init__(self, count, width):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
        self.positions = nn.Parameter(torch.zeros(count, width))
        self.head = nn.Linear(width, 8)

    def forward(self, inputs):
        return self.head(torch.tanh(self.layers(inputs) + self.positions.unsqueeze(0)))


def gradients_that_share_memory(**options):
    hvd.init()
    size = hvd.size()
    torch.manual_seed(0)
    model, alone = Positions(640, 256), Positions(640, 256)
    alone.load_state_dict(model.state_dict())
    opt = wrap(model, lr=0.0, **options)
    for step in range(4):
        expected = 0
        for rank in range(size):
            torch.manual_seed(100 * step + rank)
            inputs = torch.randn(1, 640, 256) * (rank + 1)
            alone.zero_grad()
            alone(inputs).square().mean().backward()
            expected += gradient(alone) / size
            if rank == hvd.rank():
                mine = inputs
        opt.zero_grad()
        model(mine).square().mean().backward()
        torch.testing.assert_close(gradient(model), expected)
        opt.step()

    for op, factor in ((hvd.Average, 1), (hvd.Sum, size)):
        if op == hvd.Sum and options:
            continue
        pair = nn.ParameterList([torch.zeros(1000), torch.zeros(1000)])     # their gradients share memory
        opt = wrap(pair, op=op, **options)
        for step in range(3):
            opt.zero_grad()
            ((pair[0].unsqueeze(0) + pair[1].unsqueeze(0)) * torch.full((1, 1000), hvd.rank() + step)).sum().backward()
            assert (gradient(pair) == factor * (mean_of(float) + step)).all(), (op, step, gradient(pair))
            opt.step()


@pytest.mark.parametrize("options", [{}, {"gradient_predivide_factor": 2.0}])
def test_gradients_that_share_memory(run_ranks, options):
    """They were once averaged in place while the pass still used them."""
    run_ranks(2, gradients_that_share_memory, arguments=options, env={"BAGUA_DEFAULT_BUCKET_SIZE": "100000"})


def weights_stay_until_the_step():
    """Algorithms that average weights write them in step(): a second pass uses the weights of the first."""
    hvd.init()
    for algorithm in ("decentralized", "low_precision_decentralized", "choco"):
        torch.manual_seed(hvd.rank())
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        opt = wrap(model, algorithm=algorithm)
        for _ in range(2):
            opt.zero_grad()
            before = flat(model.parameters())
            loss = model(torch.ones(1, 3)).sum()
            loss.backward(retain_graph=True)
            once = gradient(model)
            assert torch.equal(flat(model.parameters()), before)
            loss.backward()
            torch.testing.assert_close(gradient(model), 2 * once)
            opt.step()
            assert not torch.equal(flat(model.parameters()), before)


def test_weights_stay_until_the_step(run_ranks):
    run_ranks(2, weights_stay_until_the_step)


def momenta_of_clipped_gradients():
    """qadam computes its momenta from the gradients at the time of the step."""
    hvd.init()
    model = nn.Linear(3, 2)
    hvd.broadcast_parameters(model.state_dict(), 0)
    opt = hvd.DistributedOptimizer(hvd.QAdamOptimizer(model.parameters(), lr=0.1, warmup_steps=1), algorithm="qadam")
    for step in range(3):
        opt.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        opt.step()
        momentum = 0.5 * (1 - 0.9 ** (step + 1))
        torch.testing.assert_close(opt.state[model.bias]["exp_avg"], torch.full((2,), momentum), rtol=0.01, atol=0)


def test_momenta_of_clipped_gradients(run_ranks):
    run_ranks(2, momenta_of_clipped_gradients)


# ------------------------------------------------------------------------------------------- kinds of passes ----


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("in the middle of the backward pass")


def a_pass_that_fails():
    hvd.init()
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.Sequential(first, second)
    hvd.broadcast_parameters(model.state_dict(), 0)
    opt = wrap(model)
    with pytest.raises(RuntimeError, match="in the middle"):
        second(Fails.apply(first(torch.ones(1, 3)))).sum().backward()
    opt.synchronize()                           # all posted gradients
    opt.zero_grad()
    for _ in range(2):
        model(torch.full((1, 3), float(hvd.rank()))).sum().backward()
        torch.testing.assert_close(second.bias.grad, torch.ones(3))
        opt.step()
        opt.zero_grad()
    assert_same_everywhere(model)


def test_a_pass_that_fails(run_ranks):
    run_ranks(2, a_pass_that_fails)


def checkpointing(reentrant):
    """Nothing waits in a reentrant checkpoint's backward pass, which runs within another one."""
    hvd.init()
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])
    plain = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])
    plain.load_state_dict(layers.state_dict())
    first, second, third, fourth = layers
    opt = wrap(layers)
    synchronized = []
    synchronize = opt.reducer.synchronize

    def watched():
        synchronized.append(opt.reducer.pending)
        synchronize()

    opt.reducer.synchronize = watched

    def segment(function, x):
        return checkpoint(function, x, use_reentrant=reentrant)

    def around(x):                              # layers outside a segment come last, first, or not at all
        return segment(fourth, segment(lambda y: third(second(y)), first(x)))

    def before(x):
        return fourth(segment(lambda y: segment(lambda z: third(second(z)), first(y)), x))

    def everything(x):
        return segment(lambda y: fourth(third(segment(lambda z: second(first(z)), y))), x)

    for model in (around, before, everything):
        opt.zero_grad()
        plain.zero_grad()
        synchronized.clear()
        model(torch.full((1, 3), hvd.rank() + 1.0, requires_grad=True) * 1.0).square().sum().backward()
        for rank in range(hvd.size()):
            x = torch.full((1, 3), rank + 1.0)
            (nn.Sequential(*plain)(x).square().sum() / hvd.size()).backward()
        assert synchronized == [True]
        torch.testing.assert_close(gradient(layers), gradient(plain))
        opt.step()
        plain.load_state_dict(layers.state_dict())
    assert_same_everywhere(layers)


def used_again():
    """A module in several reentrant checkpoints of a pass: its gradient is complete when the outer pass ends."""
    hvd.init()
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
    plain = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
    plain.load_state_dict(model.state_dict())
    opt = wrap(model)

    def segment(x, *layers):
        return checkpoint(nn.Sequential(*layers), x, use_reentrant=True)

    def both(x, layers):                        # one layer in two checkpoints only
        return segment(segment(x, layers[0], layers[1]), layers[1], layers[2])

    def within_first(x, layers):                # used outside after its use within
        return layers[2](segment(layers[0](x), layers[0], layers[1]))

    for function in (both, within_first, both):
        opt.zero_grad()
        plain.zero_grad()
        function(torch.full((1, 3), hvd.rank() + 1.0, requires_grad=True) * 1.0, model).square().sum().backward()
        for rank in range(hvd.size()):
            x = torch.full((1, 3), rank + 1.0, requires_grad=True) * 1.0
            (function(x, plain).square().sum() / hvd.size()).backward()
        torch.testing.assert_close(gradient(model), gradient(plain))
        opt.step()
        plain.load_state_dict(model.state_dict())
    x = torch.ones(1, 3, requires_grad=True) * 1.0
    with pytest.raises(AssertionError, match=r"2\.bias is used both within a reentrant .*use_reentrant=False"):
        model[2](segment(x, model[1], model[2])).sum().backward()


def test_a_module_in_several_reentrant_checkpoints(run_ranks):
    run_ranks(2, used_again, timeout=60)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(run_ranks, reentrant):
    run_ranks(2, checkpointing, arguments={"reentrant": reentrant})


def several_optimizers():
    """One pass through several optimizers, other ones on each rank: no rank waits before all gradients are posted."""
    hvd.init()
    rank = hvd.rank()
    torch.manual_seed(0)
    models = nn.ModuleList([nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]) for _ in range(2)])
    opts = [wrap(model) for model in models]
    x = torch.ones(1, 3)
    # A GAN's generator pass, and the discriminator's. Then each rank uses one optimizer, or half of both.
    sum(part(x) for model in models for part in model).sum().backward()
    for opt in opts:
        opt.zero_grad()
    sum(part(x * (rank + 1)) for model in models for part in model).sum().backward()
    for model, opt in zip(models, opts, strict=True):
        torch.testing.assert_close(model[0].weight.grad, torch.full((2, 3), 1.5))
        opt.step()
        opt.zero_grad()
    for _ in range(2):
        used = [models[0][1], models[1][0]] if rank == 0 else [models[1][1]]
        sum(part(x) for part in used).sum().backward()
        for opt in opts:
            opt.step()
        for part in (models[0][1], *models[1]):
            torch.testing.assert_close(part.bias.grad, torch.full((2,), 0.5))
        for opt in opts:
            opt.zero_grad()
    assert_same_everywhere(models)


def test_several_optimizers(run_ranks):
    run_ranks(2, several_optimizers)


def different_numbers_of_passes():
    """One rank makes a second pass before its step, which does not match the other rank's next step."""
    hvd.init()
    model = nn.Linear(3, 2)
    opt = wrap(model)
    with pytest.raises(hvd.HorovodInternalError):
        for _ in range(3):
            opt.zero_grad()
            loss = model(torch.ones(1, 3)).sum()
            for _ in range(2 - hvd.rank()):
                loss.backward(retain_graph=True)
            opt.step()
    assert opt.reducer.model.step == hvd.rank()


def test_different_numbers_of_passes(run_ranks):
    first, _ = run_ranks(2, different_numbers_of_passes,
                         env={"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"})
    assert "gradients.0.0.again" in first.output


# ------------------------------------------------------------------------------------------- waiting in step() ----


def waits_in_step():
    hvd.init()
    rank = hvd.rank()
    model = nn.Linear(3, 2)
    hvd.broadcast_parameters(model.state_dict(), 0)
    opt = wrap(model)
    expected = torch.tensor([mean_of(lambda r: r + 1.0)] * 6 + [1.0] * 2)
    x = torch.full((1, 3), rank + 1.0)
    for time in range(3):
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        assert opt.reducer.pending
        with pytest.raises(AssertionError, match=r"optimizer.zero_grad\(\) was called after loss.backward\(\) but"):
            opt.zero_grad()
        if time > 0:                            # in the first step nothing is posted before step()
            with opt.no_sync(), pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
                loss.backward()
            # Before torch 2.8 autograd still holds most gradients in their hooks: copies are sent, changes not noticed.
            noticed = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)
            with pytest.raises(RuntimeError, match="was changed while it was averaged") if noticed else nullcontext():
                opt.synchronize()
            opt.zero_grad()
            model(x).sum().backward()
        opt.step()
        torch.testing.assert_close(gradient(model), expected)
        opt.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(x).sum()).backward()
    scaler.unscale_(opt)
    torch.testing.assert_close(gradient(model), expected)
    scaler.step(opt)
    opt.zero_grad()
    model(x).sum().backward()
    hvd.clip_grad_norm_(opt, 1e6)
    torch.testing.assert_close(gradient(model), expected)
    opt.step()
    assert_same_everywhere(model)


def test_waits_in_step(run_ranks):
    run_ranks(2, waits_in_step, env={"BAGUA_GRADIENTS_UNTOUCHED": "1"})


def gradients_untouched_by_argument():
    hvd.init()
    os.environ["BAGUA_GRADIENTS_UNTOUCHED"] = "sometimes"
    with pytest.raises(ValueError, match="BAGUA_GRADIENTS_UNTOUCHED='sometimes': expected 0 or 1"):
        wrap(nn.Linear(1, 1))
    model = nn.Linear(3, 2)
    opt = wrap(model, gradients_untouched=True)
    model(torch.ones(1, 3)).sum().backward()
    assert opt.reducer.pending
    opt.step()


def test_gradients_untouched_by_argument(run_ranks):
    run_ranks(2, gradients_untouched_by_argument)


def untouched_in_any_order():
    """Nothing waits in backward(), so ranks may make the passes of several optimizers in different orders."""
    hvd.init()
    parameters = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))
    opts = [hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("p", parameter)], gradients_untouched=True)
            for parameter in parameters]
    for _ in range(3):
        for parameter in parameters[::-1] if hvd.rank() else parameters:
            parameter.sum().backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    assert [set(parameter.tolist()) for parameter in parameters] == [{-3.0}, {-3.0}]


def test_untouched_in_any_order(run_ranks):
    run_ranks(2, untouched_in_any_order, timeout=60)


# ------------------------------------------------------------------------------------ closures, proxies, LBFGS ----


class Proxy:
    """Like Lightning's optimizer: a class that inherits the wrapped one's."""

    def __init__(self, optimizer, copied):
        self.__dict__ = {k: v for k, v in optimizer.__dict__.items() if k not in ("step", "__del__")} if copied else {}
        self._optimizer = optimizer
        self.__class__ = type("Lightning" + type(optimizer).__name__, (Proxy, type(optimizer)), {})

    def step(self, closure=None):
        return self._optimizer.step(closure=closure)

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


def proxies():
    hvd.init()
    for copied in (False, True):
        model = nn.Linear(3, 2)
        hvd.broadcast_parameters(model.state_dict(), 0)
        opt = wrap(model)
        proxy = Proxy(opt, copied)
        assert proxy.param_groups[0]["params"] == list(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(proxy._optimizer, 1, 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                proxy.zero_grad()
                model(torch.full((1, 3), float(hvd.rank()))).sum().backward()
                proxy.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                with proxy.skip_synchronize():
                    proxy.step()
                scheduler.step()
            with proxy.no_sync():
                model(torch.ones(1, 3)).sum().backward()
        with pytest.warns(UserWarning, match="skip_synchronize"):
            proxy.synchronize()
            proxy.step()
        assert proxy.state_dict()["param_groups"] == opt.state_dict()["param_groups"]
        assert_same_everywhere(model, f"proxy {copied}")


def test_proxies(run_ranks):
    run_ranks(2, proxies)


def closures_come_first():
    """step(closure) calls it first, and it can clip reduced gradients, also for algorithms that make the step."""
    hvd.init()
    rank = hvd.rank()
    for algorithm in ("gradient_allreduce", "qadam", "local_sgd"):
        for gradients_untouched in (False, True):
            model = nn.Linear(3, 2)
            hvd.broadcast_parameters(model.state_dict(), 0)
            base = hvd.QAdamOptimizer(model.parameters(), lr=0.1, warmup_steps=2) if algorithm == "qadam" else \
                torch.optim.SGD(model.parameters(), lr=0.1)
            opt = hvd.DistributedOptimizer(base, algorithm=algorithm, gradients_untouched=gradients_untouched)
            seen = []

            def closure(model=model, opt=opt, seen=seen):
                opt.zero_grad()
                if rank == 0 and len(seen) == 3:            # this rank has no batch
                    seen.append(None)
                    return None
                loss = model(torch.full((1, 3), rank + 1.0)).sum()
                loss.backward()
                if not opt._backward.gradients_untouched:
                    nn.utils.clip_grad_value_(model.parameters(), 1.25)
                seen.append(gradient(model))
                return loss

            for _ in range(5):
                before = flat(model.parameters())
                loss = opt.step(closure)
                assert (loss is None) == (seen[-1] is None)
                assert not torch.equal(flat(model.parameters()), before)
            if algorithm == "gradient_allreduce" and not gradients_untouched:
                torch.testing.assert_close(seen[0], torch.tensor([1.25] * 6 + [1.0] * 2))
            if algorithm != "local_sgd":
                assert_same_everywhere(model, f"closure {algorithm} {gradients_untouched}")


def test_closures_come_first(run_ranks):
    run_ranks(2, closures_come_first)


def lbfgs():
    """LBFGS with a line search equals one process with the data of all ranks."""
    hvd.init()

    def data(rank):
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(20, 4, generator=generator)
        return x, x.sin().sum(1, keepdim=True) * (rank + 1)

    def loss_of(model, rank):
        x, y = data(rank)
        return (model(x) - y).square().mean()

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        return model.float(), {"lr": 0.5, "max_iter": 7, "line_search_fn": "strong_wolfe"}

    model, arguments = make()
    opt = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), **arguments))
    alone, arguments = make()
    plain = torch.optim.LBFGS(alone.parameters(), **arguments)

    def closure():
        opt.zero_grad()
        loss = loss_of(model, hvd.rank())
        loss.backward()
        return loss

    def whole():
        plain.zero_grad()
        loss = mean_of(lambda rank: loss_of(alone, rank))
        loss.backward()
        return loss

    for _ in range(3):
        torch.testing.assert_close(opt.step(closure), plain.step(whole).detach(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(flat(model.parameters()), flat(alone.parameters()), rtol=1e-2, atol=1e-3)
    assert_same_everywhere(model)


def test_lbfgs(run_ranks):
    run_ranks(2, lbfgs)


def scheduler_from_before():
    hvd.init()
    for op in (hvd.Average, hvd.Adasum):
        model = nn.Linear(3, 2)
        base = torch.optim.SGD(model.parameters(), lr=0.4)
        scheduler = torch.optim.lr_scheduler.StepLR(base, 1, 0.5)
        opt = hvd.DistributedOptimizer(base, op=op)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                model(torch.ones(1, 3)).sum().backward()
                opt.step()
                scheduler.step()
                opt.zero_grad()
        assert opt.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("n", [1, 2])
def test_scheduler_from_before(run_ranks, n):
    run_ranks(n, scheduler_from_before)


# ------------------------------------------------------------------------------------ behaviour of Horovod ----


def as_horovod():
    hvd.init()
    model = nn.ModuleDict({"rows": nn.Embedding(5, 2, sparse=True), "linear": nn.Linear(2, 1)})
    hvd.broadcast_parameters(model.state_dict(), 0)
    model["linear"].bias.requires_grad_(False)
    for named in (None, list(model.named_parameters())):
        for parameter in model.parameters():
            parameter.grad = None
        groups = [{"params": [parameter]} for parameter in model.parameters()]
        opt = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), named)
        assert (opt.param_groups[0]["params"][0].grad == 0).all() and model["linear"].bias.grad is None
        assert list(opt._parameter_names) == list(model.parameters())
        assert len(set(opt._parameter_names.values())) == 3
        assert len(set(hvd.allgather_object(tuple(opt._parameter_names.values())))) == 1
        # Placeholder zeros do not make a sparse gradient dense.
        model["linear"](model["rows"](torch.tensor([hvd.rank()]))).sum().backward()
        assert model["rows"].weight.grad.is_sparse
        opt.step()
    weight = model["linear"].weight
    weight.grad = torch.full_like(weight, hvd.rank() + 1.0)
    handle, _ = opt._allreduce_grad_async(weight)
    hvd.synchronize(handle)
    assert (weight.grad == (hvd.size() + 1) / 2).all()
    # A gradient set before wrapping stays, and backward() adds to it.
    other = nn.Linear(2, 1)
    other.weight.grad = torch.full_like(other.weight, 3.0)
    kept = weakref.ref(other.weight.grad)
    wrap(other)
    assert other.weight.grad is kept()
    with torch.no_grad():
        other.bias.grad += 2
    other(torch.ones(1, 2)).sum().backward()
    assert other.weight.grad[0, 0] == 4 and other.bias.grad == 3


def test_as_horovod(run_ranks):
    run_ranks(2, as_horovod)


# ----------------------------------------------------------------------------------------------------- frozen ----


def unfrozen_later():
    hvd.init()
    rank = hvd.rank()
    for options in ({}, {"op": hvd.Sum}, {"algorithm": "bytegrad"}, {"algorithm": "local_sgd"},
                    {"gradients_untouched": True}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[0].requires_grad_(False)
        opt = wrap(model, **options)
        times = hvd.size() if options.get("op") == hvd.Sum else 1
        for step in range(5):
            if step == 2:
                model[0].requires_grad_(True)
            opt.zero_grad()
            model(torch.full((1, 3), float(rank))).sum().backward()
            weights = model[1].weight.detach().sum(0)[:, None]
            opt.step()
            assert (model[0].weight.grad is None) == (step < 2)
            if step >= 2 and options.get("algorithm") != "local_sgd":
                expected = times * (hvd.size() - 1) / 2 * weights.expand(3, 3)
                torch.testing.assert_close(model[0].weight.grad, expected, rtol=0.02, atol=0.02)
        if options.get("algorithm") == "local_sgd":
            hvd.consensus(model)
        assert_same_everywhere(model, f"{options}")
    model[0].requires_grad_(False)
    opt = wrap(model, algorithm="async")
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match="0.weight was frozen .* which Async cannot add: unfreeze it before"):
        model(torch.ones(1, 3)).sum().backward()
    opt.algorithm.abort()


def test_unfrozen_later(run_ranks):
    run_ranks(2, unfrozen_later)


def unfrozen_alone():
    """The first pass uses no parameter that took part before."""
    hvd.init()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    hvd.broadcast_parameters(model.state_dict(), 0)
    for begins_with in ([], [model[1]]):
        model.requires_grad_(False)
        for module in begins_with:
            module.requires_grad_(True)
        opt = wrap(model, lr=0.0)
        if begins_with:
            model(torch.ones(1, 3)).sum().backward()
        opt.step()
        model.requires_grad_(False)
        model[0].requires_grad_(True)
        for _ in range(2):
            opt.zero_grad()
            model(torch.full((1, 3), float(hvd.rank()))).sum().backward()
            expected = mean_of(float) * model[1].weight.sum(0)[:, None].expand(3, 3)
            torch.testing.assert_close(model[0].weight.grad, expected)
            opt.step()


def test_unfrozen_alone(run_ranks):
    run_ranks(2, unfrozen_alone)


def unfrozen_before_several_passes():
    """Also for gradients that are not contiguous, and several passes per step."""
    hvd.init()
    rank, n = hvd.rank(), hvd.size()
    for op in (hvd.Average, hvd.Sum):
        model = nn.Sequential(nn.Conv2d(3, 3, 2), nn.Conv2d(3, 3, 2)).to(memory_format=torch.channels_last)
        hvd.broadcast_parameters(model.state_dict(), 0)
        model[0].requires_grad_(False)
        opt = wrap(model, lr=0.0, op=op)
        x = torch.ones(1, 3, 4, 4).to(memory_format=torch.channels_last)
        for step in range(3):
            if step == 1:
                model[0].requires_grad_(True)
            opt.zero_grad()
            for passes in (1, 2):
                (model(x).sum() * (rank + 1)).backward()
                (one,) = torch.autograd.grad(model(x).sum(), [model[1].weight])
                expected = [one]
                if step:
                    expected += torch.autograd.grad(model(x).sum(), [model[0].weight])
                for parameter, each in zip((model[1].weight, model[0].weight), expected, strict=False):
                    times = passes * n * (n + 1) / 2 / (1 if op == hvd.Sum else n)
                    torch.testing.assert_close(parameter.grad, times * each)
            opt.step()


def test_unfrozen_before_several_passes(run_ranks):
    run_ranks(2, unfrozen_before_several_passes)


def frozen_later():
    """A frozen parameter keeps no gradient, and momentum does not move it."""
    hvd.init()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    hvd.broadcast_parameters(model.state_dict(), 0)
    opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(3):
        if step == 1:
            model[0].requires_grad_(False)
        before = flat(model[0].parameters())
        opt.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        opt.step()
        assert torch.equal(flat(model[0].parameters()), before) == (step > 0)
    assert_same_everywhere(model)


def test_frozen_later(run_ranks):
    run_ranks(2, frozen_later)


# ---------------------------------------------------------------------------------------- ranks without a batch ----


def without_a_batch(first, second, joins):
    """One optimizer communicates in step(), another in backward(), where ranks with a batch wait for the idle rank."""
    hvd.init()
    size, rank = hvd.size(), hvd.rank()
    start = [torch.arange(3.0), torch.arange(4.0)]
    lr = 0.1

    def wrapped(algorithm, parameter):
        if algorithm == "local_sgd":
            algorithm = algorithms.LocalSGD(1)
        return hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=lr), [("p", parameter)], algorithm=algorithm)

    parameters = [nn.Parameter(values.clone()) for values in start]
    opts = [wrapped(algorithm, parameter) for algorithm, parameter in zip((first, second), parameters, strict=True)]
    for step in range(6):
        idle = step % (size + 1)        # in some steps no rank
        if rank != idle:
            loss = sum((parameter * (1 + rank + step)).sum() for parameter in parameters)
            loss.backward()
        for opt in opts if step % 2 == 0 else opts[::-1]:
            opt.step()
        for opt in opts:
            opt.zero_grad()
        mean = sum(1 + r + step for r in range(size) if r != idle) / size
        for parameter, values in zip(parameters, start, strict=True):
            values -= lr * mean
            torch.testing.assert_close(parameter.detach(), values)
    if joins and rank == 0:
        hvd.join()
    elif joins:
        for _ in range(3):
            sum(parameter.sum() for parameter in parameters).backward()
            for opt in opts:
                opt.step()
                opt.zero_grad()
        hvd.join()


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize(("first", "second"), [
    ("local_sgd", "gradient_allreduce"), ("gradient_allreduce", "local_sgd"), ("local_sgd", "local_sgd")])
def test_without_a_batch(run_ranks, first, second, joins):
    run_ranks(3, without_a_batch, arguments={"first": first, "second": second, "joins": joins}, timeout=60)


def without_a_batch_beside_untouched():
    """The other ranks wait for one optimizer in backward(), for the other in step(); this rank skips all passes."""
    hvd.init()
    for untouched in (True, False):
        parameters = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))
        opts = [hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("p", parameter)],
                                         gradients_untouched=each)
                for parameter, each in zip(parameters, (untouched, not untouched), strict=True)]
        for step in range(4):
            if hvd.rank() or step > 1:
                sum(parameter.sum() for parameter in parameters).backward()
            for opt in opts:
                opt.step()
                opt.zero_grad()
        assert [set(parameter.tolist()) for parameter in parameters] == [{-3.0}, {-3.0}]


def test_without_a_batch_beside_untouched(run_ranks):
    run_ranks(2, without_a_batch_beside_untouched, timeout=60)


def without_a_batch_when_groups_are_added():
    """Ranks agree again, in each optimizer's step(): nothing waits in backward()."""
    hvd.init()
    parameters = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))
    opts = [hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("p", parameter)], gradients_untouched=True)
            for parameter in parameters]
    for step in range(4):
        if step == 2:
            for opt in opts:
                opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        if hvd.rank() or step < 2:
            sum(parameter.sum() for parameter in parameters).backward()
        for opt in opts[::-1]:
            opt.step()
            opt.zero_grad()
    assert [set(parameter.tolist()) for parameter in parameters] == [{-3.0}, {-3.0}]


def test_without_a_batch_when_groups_are_added(run_ranks):
    run_ranks(2, without_a_batch_when_groups_are_added, timeout=60)


def without_the_first_batch_of_a_window():
    """The other optimizer's window continues, because it has sent nothing yet."""
    hvd.init()
    often, rarely = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))
    first, second = (hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("p", parameter)],
                                              backward_passes_per_step=passes)
                     for parameter, passes in ((often, 1), (rarely, 2)))
    for window in range(3):
        for batch in range(2):
            idle = window == 1 and batch == 0 and hvd.rank() == 0
            if not idle:
                (often.sum() + rarely.sum()).backward()
            first.step()
            first.zero_grad()
        second.step()
        second.zero_grad()
    assert often.tolist() == [-5.5] * 3 and rarely.tolist() == [-5.5] * 4


def test_without_the_first_batch_of_a_window(run_ranks):
    run_ranks(2, without_the_first_batch_of_a_window, timeout=60)


def nodes_stay():
    def metadata():
        return [p.view_as(p).grad_fn.next_functions[0][0].metadata for p in model.parameters()]

    hvd.init()
    model = nn.Linear(3, 2)
    optimizer = wrap(model)
    for number, of_node in enumerate(metadata()):
        of_node["number"] = number
    for _ in range(3):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert [of_node.get("number") for of_node in metadata()] == [0, 1]


def test_the_nodes_that_accumulate_stay(run_ranks):
    """On a GPU a node uses the stream that it was created on, and a bucket needs gradients of a single stream."""
    run_ranks(2, nodes_stay)


def test_hooks_of_several_devices_run_one_at_a_time():
    parameters = [torch.ones(2, device=device, requires_grad=True) for device in ("cpu", "meta")]
    source = SimpleNamespace(parameters=parameters, names=["a", "b"], op=hvd.Average,
                             begin_with_zeros=lambda index, node: node.register_prehook(lambda _: None))

    class Reducer:
        pass

    reducer = Reducer()
    hooks = Backward(reducer, source, False, {})
    taken = []

    def gradient_ready(index, whole):
        other = threading.Thread(target=lambda: taken.append(hooks._lock.acquire(blocking=False)))
        other.start()
        other.join()

    end = SimpleNamespace(task=None, gradient_ready=gradient_ready)
    hooks._end = lambda: end
    for index, parameter in enumerate(parameters):
        parameter.grad = torch.zeros_like(parameter)
        hooks._accumulated(index, parameter)
    assert taken == [False, False]
