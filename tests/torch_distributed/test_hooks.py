"""bagua_hvd's algorithms under DistributedDataParallel: hooks, and optimizers that communicate instead of DDP."""
import copy
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bagua_hvd.torch as hvd
from bagua_hvd import algorithms
from bagua_hvd.algorithms import base
from bagua_hvd.torch import ddp
from torch_group import start

BEYOND_GRADIENTS = {
    "async", "auto", "choco", "decentralized", "diloco", "local_sgd",
    "low_precision_decentralized", "onebit_adam", "qadam"}
# torch joins gloo's threads when a group's last DDP is collected. It holds the GIL then, and one of these threads may
# wait for the GIL to release a tensor. So every DDP is kept until the process ends.
KEPT = []
# Their models differ between ranks after a step.
APART = {"async", "choco", "decentralized", "diloco", "local_sgd"}


def model(**options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    return DistributedDataParallel(net, **options)


def batches(rank, steps, first=0):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        x = torch.randn(32, 12, generator=generator)
        yield x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def train(net, optimizer, rank, steps=6, first=0):
    for x, y in batches(rank, steps, first):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


def flat(net):
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


def spread(net):
    mine = flat(net)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return max((other - mine).abs().max().item() for other in everyones)


def every_algorithm(file, backend):
    rank, size = start(file, backend)
    reference = model()
    if backend == "gloo":
        KEPT.append(reference)
    optimizer = torch.optim.Adam(reference.parameters(), 0.01)
    first = train(reference, optimizer, rank, 1)
    train(reference, optimizer, rank, 19, 1)
    for name in algorithms.names():
        net = model()
        optimizer = torch.optim.Adam(net.parameters(), 0.01)
        if name in BEYOND_GRADIENTS:
            with pytest.raises(ValueError, match="more than communicate gradients .* use bagua_hvd.torch.ddp.wrap"):
                ddp.hook(name)
            optimizer = ddp.wrap_optimizer(optimizer, net, name)
        else:
            net.register_comm_hook(None, ddp.hook(name))
        loss = train(net, optimizer, rank, 20)
        assert loss < first, (name, loss, first)
        assert name in APART or spread(net) == 0, name
        if name == "gradient_allreduce":
            assert torch.allclose(flat(net), flat(reference), atol=1e-6)
        dist.barrier()
    dist.destroy_process_group()


def state_goes_on(file):
    """Error feedback and projections are restored from a checkpoint, and training continues unchanged."""
    rank, size = start(file)
    for name, arguments in (("doublesqueeze", {}), ("powersgd", {"warmup_steps": 1, "rank": 1}),
                            ("topk", {"ratio": 0.2})):
        # If DDP does not rebuild its buckets after the first step, results are equal bit for bit.
        whole, state = model(find_unused_parameters=True), ddp.State()
        hook = ddp.hook(name, **arguments)
        whole.register_comm_hook(state, pickle.loads(pickle.dumps(hook)))
        optimizer = torch.optim.SGD(whole.parameters(), 0.05)
        train(whole, optimizer, rank, 5)
        assert state.step == 5
        saved, weights = pickle.dumps(state), copy.deepcopy(whole.module.state_dict())
        train(whole, optimizer, rank, 4, 5)

        state = pickle.loads(saved)
        assert state.step == 5
        assert torch.equal(flat_after(whole, weights, state, hook, rank), flat(whole)), name
        assert not torch.equal(flat_after(whole, weights, ddp.State(), hook, rank), flat(whole)), name
    dist.destroy_process_group()


class Pair(nn.Module):
    """Two weights of one shape, whose gradients come in an order that DDP does not expect."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(64)), nn.Parameter(torch.zeros(64))

    def forward(self, x):
        return (self.a * x).sum() - 1000 * (self.b * x).sum()


def equal_shapes(file):
    """Residuals of one weight are never used for the other, though DDP swaps their buckets after a step."""
    rank, size = start(file)

    def backward(net, x):
        net.zero_grad()
        net(x).backward()
        wrong = (net.module.a.grad < 0).sum() + (net.module.b.grad > 0).sum()
        assert wrong == 0, (net.module.a.grad, net.module.b.grad)

    x = torch.arange(1.0, 65)
    for limit in (25, 1e-4):        # both in one bucket, and each in its own
        hook = ddp.hook("topk", ratio=0.05, full_steps=0)
        net, state = DistributedDataParallel(Pair(), bucket_cap_mb=limit), ddp.State()
        net.register_comm_hook(state, hook)
        for _ in range(6):
            backward(net, x)
        saved = state.state_dict()
        old = {**saved, "buckets": {key[:2]: kept for key, kept in saved["buckets"].items()}}
        for loaded in (saved, old):         # the old one names no parameters, so it starts empty
            net, state = DistributedDataParallel(Pair(), bucket_cap_mb=limit), ddp.State()
            net.register_comm_hook(state, hook)
            state.load_state_dict(loaded)
            sent = 0
            for _ in range(4):              # gradients of 0 yield the residuals, and nothing else
                backward(net, 0 * x)
                sent += sum(parameter.grad.abs().sum() for parameter in net.parameters())
            assert (sent > 0) == (loaded is saved)
    dist.destroy_process_group()


def two_models(file):
    """One hook keeps separate residuals for two models with alternating backward passes."""
    rank, size = start(file)

    def trained(hooks):
        torch.manual_seed(0)
        nets = [DistributedDataParallel(nn.Sequential(nn.Linear(12, width), nn.Linear(width, 3)), bucket_cap_mb=0.001)
                for width in (40, 60)]
        for net, hook in zip(nets, hooks, strict=True):
            net.register_comm_hook(None, hook)
        optimizers = [torch.optim.SGD(net.parameters(), 0.05) for net in nets]
        for step in range(6):
            for net, optimizer in zip(nets, optimizers, strict=True):
                train(net, optimizer, rank, 1, step)
        return nets

    arguments = {"ratio": 0.2, "full_steps": 0}
    hook = ddp.hook("topk", **arguments)
    together = trained([hook, hook])
    apart = trained([ddp.hook("topk", **arguments), ddp.hook("topk", **arguments)])
    for mine, expected in zip(together, apart, strict=True):
        assert torch.equal(flat(mine), flat(expected))
    dist.destroy_process_group()


def flat_after(net, weights, state, hook, rank):
    net = copy.deepcopy(net.module)
    net.load_state_dict(weights)
    net = DistributedDataParallel(net, find_unused_parameters=True)
    net.register_comm_hook(state, hook)
    train(net, torch.optim.SGD(net.parameters(), 0.05), rank, 4, 5)
    return flat(net)


def weighted(file):
    """Unequal batches have the result of one process with all the data."""
    rank, size = start(file)
    counts = [(4, 1, 7), (0, 3, 2), (2, 2, 2)]
    for algorithm, arguments in (("gradient_allreduce", {}), ("powersgd", {"rank": 100})):
        state, net, alone = ddp.State(), model(), model().module
        net.register_comm_hook(state, ddp.hook(algorithm, **arguments))
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (net, alone)]
        for step, of_ranks in enumerate(counts):
            parts = [tuple(part[:count] for part in next(batches(other, 1, step)))
                     for other, count in enumerate(of_ranks)]
            state.set_weight(of_ranks[rank])
            for each, optimizer, (x, y) in ((net, optimizers[0], parts[rank]),
                                            (alone, optimizers[1], map(torch.cat, zip(*parts, strict=True)))):
                optimizer.zero_grad()
                nn.functional.cross_entropy(each(x), y).backward()
                optimizer.step()
        torch.testing.assert_close(flat(net), flat(alone), rtol=1e-5, atol=1e-6)
    state.set_weight(-rank)
    with pytest.raises(ValueError, match="2 ranks gave an invalid one"):
        train(net, optimizers[0], rank, 1)
    dist.destroy_process_group()


def test_weighted(run_ranks, tmp_path):
    run_ranks(3, weighted, arguments={"file": str(tmp_path / "store")})


def around(file):
    """no_sync, groups of some ranks, rejected calls."""
    rank, size = start(file)
    net = model()
    net.register_comm_hook(ddp.State(), ddp.hook("bytegrad", hierarchical=False))
    with net.no_sync():
        train(net, torch.optim.SGD(net.parameters(), 0.0), rank, 1)
    assert net._comm_hooks[0][1].step == 0
    net = model()
    optimizer = ddp.wrap_optimizer(torch.optim.SGD(net.parameters(), 0.1), net, "gradient_allreduce")
    with net.no_sync():
        for x, y in batches(rank, 2):
            nn.functional.cross_entropy(net(x), y).backward()
    before = flat(net)
    for x, y in batches(rank, 1, 2):
        nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    assert spread(net) == 0 and not torch.equal(flat(net), before)
    with pytest.raises(ValueError, match="has a communication hook, which would never be called"):
        hooked = model()
        hooked.register_comm_hook(None, ddp.hook())
        ddp.wrap_optimizer(torch.optim.SGD(hooked.parameters(), 0.1), hooked, "decentralized")
    with pytest.raises(ValueError, match="takes a DistributedDataParallel model, not Linear"):
        ddp.wrap_optimizer(None, nn.Linear(1, 1), "decentralized")
    with pytest.raises(ValueError, match="unknown algorithm 'bytegrat'. Did you mean 'bytegrad'"):
        ddp.hook("bytegrat")
    pair = dist.new_group([0, 2])
    if rank != 1:
        net = model(process_group=pair)
        net.register_comm_hook(ddp.State(pair), ddp.hook("bytegrad"))
        train(net, torch.optim.SGD(net.parameters(), 0.1), rank)
        both = torch.empty(2, len(flat(net)))
        dist.all_gather_single(both, flat(net), group=pair)
        assert torch.equal(both[0], both[1])
    dist.barrier()
    hvd.barrier()
    dist.destroy_process_group()


def scaled(file):
    """Error feedback under a changing loss scale applies the same gradients as without, also after an overflow."""
    rank, size = start(file)

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(512))

        def forward(self, c):
            return (self.w * c).sum()

    c = torch.rand(512, generator=torch.Generator().manual_seed(3)) + 0.5

    def trained(factor, overflow=None):
        net = DistributedDataParallel(Weighted())
        optimizer = torch.optim.SGD(net.parameters(), 1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**9)
        hook = ddp.hook("topk", ratio=0.05, full_steps=0)
        if overflow is None:
            net.register_comm_hook(None, hook)
            with pytest.raises(ValueError, match=r"keeps errors .*ddp.State\(scaler=scaler\)"):
                scaler.scale(net(c)).backward()
            net = DistributedDataParallel(Weighted())
            optimizer = torch.optim.SGD(net.parameters(), 1.0)
        net.register_comm_hook(ddp.State(scaler=scaler), hook)
        for step in range(40):
            optimizer.zero_grad()
            loss = net(c * float("inf") if step == overflow and rank == 1 else c)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update(scaler.get_scale() * factor if step != overflow else None)
        return net.module.w.detach()

    constant = trained(1.0)
    assert 0.5 < (-constant / (40 * c)).mean() <= 1.01
    for factor in (2.0, 0.5):
        assert torch.allclose(trained(factor), constant, rtol=1e-4), factor
    lost = trained(1.0, 7)
    assert lost.isfinite().all() and 0.5 < (-lost / (39 * c)).mean() <= 1.01
    dist.destroy_process_group()


def parts(file):
    """Complex and sparse gradients."""
    rank, size = start(file)
    for name in ("gradient_allreduce", "bytegrad"):
        torch.manual_seed(0)
        net = nn.Linear(6, 6, dtype=torch.complex64)
        reference = copy.deepcopy(net)
        wrapped = DistributedDataParallel(net)
        wrapped.register_comm_hook(None, ddp.hook(name))
        for step in range(3):
            x = torch.randn(size, 5, 6, dtype=torch.complex64, generator=torch.Generator().manual_seed(step))
            net.zero_grad(), reference.zero_grad()
            (wrapped(x[rank]).abs() ** 2).mean().backward()
            (reference(x.reshape(-1, 6)).abs() ** 2).mean().backward()
            for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
                apart = (ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max()
                assert apart < (0.02 if name == "bytegrad" else 1e-5), (name, step, apart)
        net = nn.Sequential(nn.Embedding(30, 4, sparse=True), nn.Flatten(), nn.Linear(12, 2))
        wrapped = DistributedDataParallel(net)
        wrapped.register_comm_hook(None, ddp.hook(name))
        for step in range(3):
            x = torch.randint(0, 30, (size, 5, 3), generator=torch.Generator().manual_seed(step))
            net.zero_grad()
            wrapped(x[rank]).pow(2).mean().backward()
            mine = net[0].weight.grad
            reference = copy.deepcopy(net)
            reference.zero_grad()
            reference(x.reshape(-1, 3)).pow(2).mean().backward()
            assert mine.is_sparse and torch.allclose(mine.to_dense(), reference[0].weight.grad.to_dense(), atol=1e-6)
    dist.destroy_process_group()


def in_ddps_place(file):
    """A DDP model whose gradients its optimizer averages: static graphs, buffers, evaluation."""
    rank, size = start(file)
    with pytest.raises(ValueError, match="static_graph=True .* leave it out"):
        static = model(static_graph=True)
        ddp.wrap_optimizer(torch.optim.SGD(static.parameters(), 0.1), static, "decentralized")
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    optimizer = ddp.wrap_optimizer(torch.optim.SGD(net.parameters(), 0.1), net, "decentralized")
    train(net, optimizer, rank, 4)
    net(next(batches(rank, 1))[0])      # broadcasts rank 0's buffers, then changes them
    everyones = [None] * size
    dist.all_gather_object(everyones, net.module[1].num_batches_tracked.item())
    assert everyones == [5] * size
    reference = net.module[1].running_mean.clone()
    with torch.no_grad():
        net.module[1].running_mean.fill_(rank + 1.0)
    net.train()
    net(torch.zeros(4, 12))
    means = [torch.empty_like(reference) for _ in range(size)]
    dist.all_gather(means, net.module[1].running_mean)
    assert all(torch.allclose(mean, means[0], atol=1e-2) for mean in means)     # weights differ slightly
    if rank == 0:                       # an evaluation needs no other ranks
        net.eval()
        net(torch.zeros(4, 12))
        net.train()
    with pytest.raises(RuntimeError, match="call optimizer.step.. as often as on the others"), net.join():
        pass
    for copied in (lambda: pickle.dumps(net), lambda: copy.deepcopy(net)):
        with pytest.raises(TypeError, match="save model.module, or its state_dict"):
            copied()
    pickle.dumps(net.module)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["bagua", "gloo"])
def test_every_algorithm(run_group, backend):
    run_group(2, every_algorithm, backend=backend)


def test_state_goes_on(run_group):
    run_group(2, state_goes_on)


def test_around_hooks(run_group):
    run_group(3, around)


@pytest.mark.parametrize("function", [scaled, parts, two_models, in_ddps_place, equal_shapes])
def test_two_ranks(run_group, function):
    run_group(2, function)


def test_an_overflow_is_kept_between_threads(monkeypatch):
    """Another thread finds an overflow while this one checks finite gradients."""
    state, finite, isfinite = ddp.State(), torch.zeros(1), torch.isfinite

    def meanwhile(tensor):
        if tensor is finite:
            other = threading.Thread(target=state._look_for_overflow, args=(torch.full((1,), torch.inf),))
            other.start()
            other.join()
        return isfinite(tensor)

    monkeypatch.setattr(torch, "isfinite", meanwhile)
    state._look_for_overflow(finite)
    assert state._overflow


def test_arguments_leave_the_hierarchy_off(monkeypatch):
    monkeypatch.setenv("BAGUA_HIERARCHY", "0")
    for arguments in ({}, {"error_feedback": True}):
        assert not ddp.hook("bytegrad", **arguments).algorithm.hierarchical
    assert not ddp.hook("bytegrad", average=False).algorithm.average


def test_arguments_without_a_name_and_with_an_instance(monkeypatch):
    assert not ddp.hook(average=False).algorithm.average
    monkeypatch.setenv("BAGUA_ALGORITHM", "powersgd")
    assert ddp.hook(None, rank=3).algorithm.rank == 3
    with pytest.raises(TypeError, match=r"ByteGrad is an instance, so it takes no error_feedback: .* or ByteGrad\("):
        ddp.hook(algorithms.ByteGrad(), error_feedback=True)


def test_state_in_a_new_job(monkeypatch):
    """It continues from the same step with the same residuals, in buckets of the new Model."""
    monkeypatch.setattr(ddp, "process_set_of", lambda group: hvd.global_process_set)
    state, algorithm, gradient = ddp.State(), algorithms.get("doublesqueeze"), torch.ones(4)
    given = SimpleNamespace(index=lambda: 0, gradients=lambda: [gradient], buffer=lambda: gradient,
                            parameters=lambda: [gradient])
    kept = []
    for job in range(2):
        hvd.shutdown()
        hvd.init()
        bucket = state._bucket(given, algorithm)
        assert state.step == job and bucket.model is state._model
        kept.append(base.error_state(bucket, hvd.global_process_set, True).worker)
        kept[-1] += 1
        state._communicated(algorithm)
    hvd.shutdown()
    assert kept[1].tolist() == [2.0] * 4


def test_a_state_of_another_algorithm(monkeypatch):
    monkeypatch.setattr(ddp, "process_set_of", lambda group: hvd.global_process_set)
    hvd.init()
    gradient = torch.ones(4)
    given = SimpleNamespace(index=lambda: 0, gradients=lambda: [gradient], parameters=lambda: [gradient],
                            buffer=lambda: gradient)
    saving, algorithm = ddp.State(), algorithms.get("doublesqueeze")
    base.error_state(saving._bucket(given, algorithm), hvd.global_process_set, True).worker[:] = 1
    saving._communicated(algorithm)
    saved = saving.state_dict()
    older = {key: value for key, value in saved.items() if key != "algorithm"}
    for loaded in (saved, older):
        state = ddp.State()
        state.load_state_dict(loaded)
        bucket = state._bucket(given, algorithm)
        assert state.step == 1 and base.error_state(bucket, hvd.global_process_set, True).worker.tolist() == [1.0] * 4
    other = ddp.State()
    other.load_state_dict(saved)
    with pytest.warns(UserWarning, match="state of DoubleSqueeze, this optimizer runs TopK, which starts without"):
        other._bucket(given, algorithms.get("topk"))
    assert other.step == 0
    hvd.shutdown()
