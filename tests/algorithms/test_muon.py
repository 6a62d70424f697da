"""torch's Muon, which orthogonalizes the momentum of matrices: with averages of gradients, and inside DiLoCo."""
import copy

import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd import algorithms
from bagua_hvd.algorithms import ByteGrad, DoubleSqueeze, PowerSGD, TopK
from diloco import whole_diloco

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")

STEPS = 6


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def loss_of(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 12, generator=generator)
    return (model(x) - x[:, :4]).pow(2).mean()


def optimizers_of(model, **options):
    """Muon for matrices, AdamW for the rest, as Muon's authors recommend."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    made = [torch.optim.Muon(matrices, lr=0.02, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]
    return [hvd.DistributedOptimizer(each, **options) for each in made] if options else made


def train(model, optimizers, rank):
    """Returns the loss of the last step, before its update."""
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return loss.item()


def reference(n, delay):
    """One process that averages the gradients of all ranks' batches."""
    model = make_model()
    optimizers = optimizers_of(model)
    late = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(STEPS):
        model.zero_grad()
        (sum(loss_of(model, rank, step) for rank in range(n)) / n).backward()
        if delay:
            for parameter, average in zip(model.parameters(), late, strict=True):
                arrived = average.clone()
                average.copy_(parameter.grad)
                parameter.grad = arrived
        for optimizer in optimizers:
            optimizer.step()
    return model


def served():
    hvd.init()
    rank, n = hvd.rank(), hvd.size()
    made = {"powersgd": PowerSGD(rank=2, warmup_steps=1), "topk": TopK(ratio=0.3), "doublesqueeze": DoubleSqueeze(),
            "bytegrad with errors": ByteGrad(error_feedback=True)}
    names = [name for name in algorithms.names() if algorithms.get(name).gradients_only]
    assert {"gradient_allreduce", "bytegrad", "powersgd"} <= set(names)
    for delay in (0, 1):
        expected = reference(n, delay)
        for name in [*names, "bytegrad with errors"]:
            model = make_model()
            first = loss_of(model, 0, 0).item()
            algorithm = made.get(name)
            optimizers = optimizers_of(model, algorithm=copy.deepcopy(algorithm) if algorithm else name, delay=delay)
            train(model, optimizers, rank)
            flat = torch.cat([p.detach().flatten() for p in model.parameters()])
            everyone = hvd.allgather(flat[None], name="same")
            assert flat.isfinite().all() and (everyone == everyone[0]).all(), (name, delay)
            assert loss_of(model, 0, 0).item() < first, (name, delay)
            if name == "gradient_allreduce":
                for actual, wanted in zip(model.parameters(), expected.parameters(), strict=True):
                    # Muon computes in bfloat16, so rounding differences become visible steps.
                    torch.testing.assert_close(actual, wanted, rtol=2e-2, atol=2e-3)


def test_muon(run_ranks):
    run_ranks(2, served, timeout=110)


def with_a_scaler():
    """Optimizers skip steps together and unscale gradients."""
    hvd.init()
    for delay in (0, 1):
        model = make_model()
        optimizers = optimizers_of(model, algorithm="gradient_allreduce", delay=delay)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(STEPS):
            before = [p.detach().clone() for p in model.parameters()]
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = loss_of(model, hvd.rank(), step) * (float("inf") if (step, hvd.rank()) == (2, 1) else 1)
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            same = all((p == b).all() for p, b in zip(model.parameters(), before, strict=True))
            assert same == (step == 2 + delay), (step, delay)
        assert scaler.get_scale() == 512.0


def test_with_a_scaler(run_ranks):
    run_ranks(2, with_a_scaler, timeout=60)


def inner():
    """MuLoCo: inner steps by Muon, an outer step by their mean; against one process."""
    hvd.init()
    rank, n, interval = hvd.rank(), hvd.size(), 2
    eta, mu = 0.7, 0.5
    models = [make_model() for _ in range(n)]
    optimizers = [optimizers_of(model) for model in models]
    outer = [p.detach().clone() for p in make_model().parameters()]
    momenta = [torch.zeros_like(p) for p in outer]
    for step in range(STEPS):
        for i, model in enumerate(models):
            model.zero_grad()
            loss_of(model, i, step).backward()
            for optimizer in optimizers[i]:
                optimizer.step()
        if step % interval == interval - 1:
            for k, (x, m) in enumerate(zip(outer, momenta, strict=True)):
                change = x - sum(list(model.parameters())[k].detach() for model in models) / n
                m.mul_(mu).add_(change)
                x.sub_(eta * (change + mu * m))
                for model in models:
                    list(model.parameters())[k].data.copy_(x)
    model = make_model()
    wrapped = optimizers_of(model, algorithm=whole_diloco(interval, full_steps=0, outer_lr=eta, outer_momentum=mu))
    train(model, wrapped, rank)
    for actual, wanted in zip(model.parameters(), outer, strict=True):
        torch.testing.assert_close(actual.detach(), wanted, rtol=2e-2, atol=2e-3)
    for name in ("diloco", "local_sgd"):
        model = make_model()
        loss = train(model, optimizers_of(model, algorithm=name), rank)
        assert loss < loss_of(make_model(), rank, STEPS - 1).item(), name


def test_inside_diloco(run_ranks):
    run_ranks(2, inner, timeout=60)
