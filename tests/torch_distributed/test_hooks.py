"""bagua_hvd's algorithms under DistributedDataParallel: hooks, and optimizers that communicate in DDP's place."""
import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bagua_hvd.torch as hvd
from bagua_hvd import algorithms
from bagua_hvd.torch import ddp
from torch_group import start

BEYOND_GRADIENTS = {
    "acco", "async", "async_decentralized", "async_low_precision", "async_low_precision_decentralized", "auto", "choco",
    "decentralized", "diloco", "dion", "lamb", "local_adam", "local_sgd", "low_precision_decentralized", "onebit_adam",
    "onebit_adam_published", "onebit_lamb", "push_sum", "qadam", "streaming_diloco", "zero_one_adam"}
# Whose models are equal after each step.
APART = {"async", "async_decentralized", "async_low_precision", "async_low_precision_decentralized", "choco",
         "decentralized", "diloco", "local_adam", "local_sgd", "push_sum", "streaming_diloco"}


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
    """Error feedback and projections survive a checkpoint: it goes on as if nothing had been."""
    rank, size = start(file)
    for name, arguments in (("doublesqueeze", {}), ("powersgd", {"warmup_steps": 1, "rank": 1}),
                            ("topk", {"ratio": 0.2})):
        # With buckets that DDP does not cut anew after the first step, it is the same to the bit.
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


def flat_after(net, weights, state, hook, rank):
    net = copy.deepcopy(net.module)
    net.load_state_dict(weights)
    net = DistributedDataParallel(net, find_unused_parameters=True)
    net.register_comm_hook(state, hook)
    train(net, torch.optim.SGD(net.parameters(), 0.05), rank, 4, 5)
    return flat(net)


def around(file):
    """no_sync, groups of some ranks, refusals."""
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


@pytest.mark.parametrize("backend", ["bagua", "gloo"])
def test_every_algorithm(run_group, backend):
    run_group(2, every_algorithm, backend=backend)


def test_state_goes_on(run_group):
    run_group(2, state_goes_on)


def test_around_hooks(run_group):
    run_group(3, around)
