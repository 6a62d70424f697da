"""Collectives and optimizer steps inside functions compiled by torch.compile: graph breaks, and correct results."""
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import bagua_hvd.torch as hvd

TIMES = 3


def forms(x):
    """Every kind of collective, in and out of place, blocking and asynchronous, single and grouped."""
    n = hvd.size()
    first = hvd.allreduce(x, op=hvd.Sum)
    second = hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum, name="named"))
    third, fourth = hvd.grouped_allreduce([x, x + 1], op=hvd.Sum)
    gathered, (also, _) = hvd.allgather(x), hvd.grouped_allgather([x, x])
    rows = hvd.alltoall(x.repeat(n).reshape(n, -1))
    received, splits = hvd.alltoall(x[:1].repeat(n), splits=torch.ones(n, dtype=torch.int32))
    scattered, (grouped,) = hvd.reducescatter(x, op=hvd.Sum), hvd.grouped_reducescatter([x], op=hvd.Sum)
    root = hvd.broadcast(x + hvd.rank(), 0)
    hvd.broadcast_(x, 0)
    hvd.barrier()
    told = hvd.broadcast_object(hvd.rank(), n - 1), hvd.allgather_object(hvd.rank())
    return (first, second, third, fourth, gathered, also, rows, received, splits, scattered, grouped, root, x), told


def compiled_forms():
    hvd.init()
    compiled = torch.compile(forms, backend="eager")
    for time in range(TIMES):
        x = torch.arange(5.0) + time + 10 * hvd.rank()
        tensors, told = compiled(x.clone())
        expected, also_told = forms(x.clone())
        for tensor, wanted in zip(tensors, expected, strict=True):
            torch.testing.assert_close(tensor, wanted, rtol=0, atol=0)
        assert told == also_told == (hvd.size() - 1, list(range(hvd.size())))


def compiled_step():
    """Also if a parameter has no gradient, and if the first steps were not compiled."""
    hvd.init()
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), named_parameters=model.named_parameters())
    start = [parameter.detach().clone() for parameter in model.parameters()]

    @torch.compile(backend="eager")
    def step():
        opt.step()
        opt.zero_grad()

    for time in range(2 * TIMES):
        model["used"](torch.full((1, 3), float(hvd.rank() + time))).sum().backward()
        if time < TIMES:
            opt.step()
            opt.zero_grad()
        else:
            step()
    moved = sum((hvd.size() - 1) / 2 + time for time in range(2 * TIMES))
    weight, bias, *others = model.parameters()
    torch.testing.assert_close(weight, start[0] - 0.1 * moved)
    torch.testing.assert_close(bias, start[1] - 0.1 * 2 * TIMES)
    torch.testing.assert_close(others, start[2:])


def compiled_backward(backend):
    """A whole step with backward(), and more layers than the compiler's limit of versions of one hook."""
    hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(12)])
    plain = nn.Sequential(*[nn.Linear(3, 3) for _ in range(12)])
    plain.load_state_dict(model.state_dict())
    for op in (hvd.Average, hvd.Sum):
        opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), op=op)

        @torch.compile(backend=backend)
        def step(x, opt=opt):
            loss = model(x).sum()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*recompile_limit.*")
            for time in range(TIMES):
                step(torch.full((1, 3), float(hvd.rank() + time)))
                for rank in range(hvd.size()):
                    loss = plain(torch.full((1, 3), float(rank + time))).sum()
                    (loss if op == hvd.Sum else loss / hvd.size()).backward()
                with torch.no_grad():
                    for parameter in plain.parameters():
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), rtol=1e-4, atol=1e-5)


def compiled_autograd():
    """Compiled autograd drops callbacks for the end of a backward pass."""
    hvd.init()
    torch._dynamo.config.compiled_autograd = True
    for untouched in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(),
                                       gradients_untouched=untouched)

        @torch.compile(backend="aot_eager")
        def backward(model, inputs):
            model(inputs).sum().backward()

        before = model.bias.detach().clone()
        with nullcontext() if untouched else pytest.raises(RuntimeError, match="leave compiled_autograd off"):
            backward(model, torch.randn(4, 8))
            opt.step()
            assert (before - model.bias == 4).all()


def test_compiled_autograd(run_ranks):
    run_ranks(2, compiled_autograd)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_backward(run_ranks, backend):
    run_ranks(2, compiled_backward, arguments={"backend": backend})


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.long), 2])
def test_forms(run_ranks, n):
    run_ranks(n, compiled_forms)


@pytest.mark.parametrize("n", [1, 2])
def test_step(run_ranks, n):
    run_ranks(n, compiled_step)
