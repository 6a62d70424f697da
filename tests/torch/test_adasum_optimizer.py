"""DistributedOptimizer(op=Adasum) combines steps according to the equation."""
import numpy as np
import pytest
import torch

import bagua_hvd.torch as hvd


def adasum(a, b):
    ab, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - ab / (2 * aa) if aa else 1.0) * a + (1 - ab / (2 * bb) if bb else 1.0) * b


def train(base, options, compression):
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    cls = getattr(torch.optim, base)
    inner = cls(model.parameters(), **options)
    torch.optim.lr_scheduler.LambdaLR(inner, lambda epoch: 1.0)     # patches inner.step, which must not be copied
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), op=hvd.Adasum,
                                         compression=getattr(hvd.Compression, compression))
    assert type(optimizer).__name__ == base and isinstance(optimizer, cls)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    assert (optimizer.gradient_predivide_factor, optimizer.process_set) == (1.0, hvd.global_process_set)
    # Repeats the other ranks' local steps on this rank.
    shadows = [torch.nn.Linear(3, 2).double() for _ in range(hvd.size())]
    locals_ = [cls(shadow.parameters(), **options) for shadow in shadows]
    schedulers = [torch.optim.lr_scheduler.StepLR(local, step_size=3, gamma=0.5) for local in locals_]

    def backward(net, rank, step):
        x = torch.from_numpy(np.random.default_rng(100 * step + rank).standard_normal((4, 3)))
        net(x).square().mean().backward()

    for step in range(6):
        start = [p.detach().clone() for p in model.parameters()]
        deltas = []
        for rank, (shadow, local) in enumerate(zip(shadows, locals_, strict=True)):
            shadow.load_state_dict(model.state_dict())
            local.zero_grad()
            backward(shadow, rank, step)
            local.step()
            deltas.append([p.detach() - s for p, s in zip(shadow.parameters(), start, strict=True)])
        optimizer.zero_grad()
        backward(model, hvd.rank(), step)
        optimizer.synchronize()     # does nothing
        optimizer.step()
        scheduler.step()
        for other in schedulers:
            other.step()
        while len(deltas) > 1:
            deltas = [[adasum(a, b) for a, b in zip(one, two, strict=True)]
                      for one, two in zip(deltas[::2], deltas[1::2], strict=True)]
        tolerance = 1e-12 if compression == "none" else 1e-2
        for p, s, delta in zip(model.parameters(), start, deltas[0], strict=True):
            torch.testing.assert_close(p.detach(), s + delta, rtol=tolerance, atol=tolerance)
    with pytest.raises(AssertionError, match="Adasum"), optimizer.skip_synchronize():
        pass
    if hvd.size() == 2:
        with pytest.raises(NotImplementedError, match="non-global"):
            hvd.DistributedOptimizer(cls(model.parameters(), **options), op=hvd.Adasum, process_set=hvd.add_process_set(
                [0]))


def grad_scaler():
    """An overflow on one rank: all ranks skip the step, and all make the next one."""
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
                                         op=hvd.Adasum)
    with pytest.raises(ValueError, match="op=hvd.Average"):
        optimizer.set_weight(1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        optimizer.zero_grad()
        before = model.weight.detach().clone()
        overflow = step % 3 == 1 and hvd.rank() == 0
        scaler.scale(model(torch.full((4, 3), hvd.rank() + 1.0)).square().mean()
                     * (float("inf") if overflow else 1)).backward()
        if step < 3:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight, before) == (step % 3 == 1)
        torch.testing.assert_close(hvd.broadcast(model.weight.detach(), 0), model.weight.detach(), rtol=0, atol=0)
    assert scaler.get_scale() == 256.0


def refuse_three():
    hvd.init()
    with pytest.raises(NotImplementedError, match="power of 2"):
        hvd.DistributedOptimizer(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0), op=hvd.Adasum)


@pytest.mark.parametrize("n, base, options, compression", [
    (2, "SGD", {"lr": 0.1, "momentum": 0.9}, "none"),
    (4, "Adam", {"lr": 0.01}, "none"),
    (2, "SGD", {"lr": 0.1}, "fp16"),
])
def test_steps_are_combined(run_ranks, n, base, options, compression):
    run_ranks(n, train, arguments={"base": base, "options": options, "compression": compression},
              env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})


def test_grad_scaler(run_ranks):
    run_ranks(2, grad_scaler)


def test_three_ranks_are_refused(run_ranks):
    run_ranks(3, refuse_three)
