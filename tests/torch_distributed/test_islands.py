"""Models that are sharded within an island by FSDP2, and algorithms between the islands."""
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import bagua_hvd.torch as hvd
from bagua_hvd import algorithms
from bagua_hvd.torch.distributed import process_set_of
from diloco import whole_diloco
from torch_group import start

ISLANDS, SHARDS, STEPS = 2, 2, 6


def net():
    """Some parameters are sharded unevenly over an island's ranks; one leaves some ranks without a shard."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 13), nn.ReLU(), nn.Linear(13, 1))


def batch(rank, step):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * rank + step))
    return x, x[:, :1] - x[:, 1:2]


def islands():
    """(this rank's mesh, the group of ranks with the same shards)."""
    mesh = init_device_mesh("cpu", (ISLANDS, SHARDS), mesh_dim_names=("island", "shard"))
    return mesh["shard"], mesh["island"].get_group()


def sharded(mesh):
    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model, optimizer, ranks, steps, first=0):
    """Trains with the mean over these ranks' batches."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        sum(nn.functional.mse_loss(model(x), y) for x, y in (batch(rank, step) for rank in ranks)
            ).div(len(ranks)).backward()
        optimizer.step()


def ranks_of(island):
    return range(island * SHARDS, (island + 1) * SHARDS)


def adam(parameters):
    return torch.optim.Adam(parameters, 0.01)


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def averaged(make):
    """Weights with gradients averaged over all ranks."""
    model = net()
    train(model, make(model.parameters()), range(ISLANDS * SHARDS), STEPS)
    return model.state_dict()


def outer_steps(make, interval=3, lr=0.7, momentum=0.5):
    """DiLoCo between islands of one process each."""
    theta = [p.detach().clone() for p in net().parameters()]
    moment = [torch.zeros_like(p) for p in theta]
    models = [net() for _ in range(ISLANDS)]
    optimizers = [make(model.parameters()) for model in models]
    for first in range(0, STEPS, interval):
        for island in range(ISLANDS):
            train(models[island], optimizers[island], ranks_of(island), interval, first)
        with torch.no_grad():
            for i, (place, m) in enumerate(zip(theta, moment, strict=True)):
                delta = sum(place - list(model.parameters())[i] for model in models) / ISLANDS
                m.mul_(momentum).add_(delta)
                place -= lr * (delta + momentum * m)
                for model in models:
                    list(model.parameters())[i].copy_(place)
    return models[0].state_dict()


def between_islands(file, backend):
    rank, _ = start(file, backend)
    hvd.init()
    mesh, group = islands()
    streaming = algorithms.DiLoCo(3, fragments=2, overlap_steps=0, full_steps=0)
    for algorithm, passed, make, expected, near in (
            ("gradient_allreduce", False, adam, averaged, 1e-5), ("bytegrad", True, sgd, averaged, 1e-2),
            (whole_diloco(3, full_steps=0), True, adam, outer_steps, 1e-5), (streaming, False, sgd, None, None)):
        model = sharded(mesh)
        options = {"process_set": process_set_of(group)} if passed else {}      # otherwise it is found
        optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(),
                                             algorithm=algorithm, **options)
        assert optimizer.process_set.ranks == [rank % SHARDS, rank % SHARDS + SHARDS]
        train(model, optimizer, [rank], STEPS)
        weights = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
        for name, weight in (expected(make) if expected else {}).items():
            assert torch.allclose(weights[name], weight, atol=near), (algorithm, name)
    hvd.barrier()           # a rank that leaves ends the job
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["bagua", "gloo"])
def test_between_islands(run_group, backend):
    run_group(ISLANDS * SHARDS, between_islands, backend=backend)


def replicated_islands(file):
    """Each rank of an island has the whole model; DistributedDataParallel averages gradients within it."""
    rank, _ = start(file)
    hvd.init()
    mesh, group = islands()
    model = nn.parallel.DistributedDataParallel(net(), process_group=mesh.get_group())
    optimizer = hvd.DistributedOptimizer(adam(model.parameters()), model.named_parameters(),
                                         algorithm=whole_diloco(3, full_steps=0),
                                         process_set=process_set_of(group))
    train(model, optimizer, [rank], STEPS)
    for name, weight in outer_steps(adam).items():
        assert torch.allclose(model.module.state_dict()[name], weight, atol=1e-5), name
    hvd.barrier()
    dist.destroy_process_group()


def test_between_islands_of_ddp(run_group):
    run_group(ISLANDS * SHARDS, replicated_islands)


class Parallel(nn.Module):
    def __init__(self, mesh):
        torch.manual_seed(0)
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        parallelize_module(self, mesh, {"norm": SequenceParallel(), "wide": ColwiseParallel(input_layouts=Shard(1)),
                                        "narrow": RowwiseParallel(output_layouts=Shard(1))})

    def forward(self, x):
        return self.narrow(torch.relu(self.wide(self.norm(x))))


def sequence_parallel(file):
    """Each rank of an island has an addend of the norms' gradients; the weights stay equal within the island."""
    rank, _ = start(file)
    hvd.init()
    mesh, _ = islands()
    for algorithm in ("gradient_allreduce", "rotated", algorithms.QAdam(warmup_steps=3)):
        model = Parallel(mesh)
        optimizer = hvd.DistributedOptimizer(adam(model.parameters()), model.named_parameters(), algorithm=algorithm)
        for step in range(8):
            optimizer.zero_grad()
            x, _ = batch(rank, step)
            model(x.view(4, 4, 8)).square().sum().backward()
            optimizer.step()
        weight = model.norm.weight.to_local()
        everyone = hvd.allgather(weight.detach()[None])
        assert torch.equal(everyone[rank ^ 1], weight) and not torch.equal(weight, torch.ones(8)), algorithm
    hvd.barrier()
    dist.destroy_process_group()


def test_sequence_parallel(run_group):
    run_group(ISLANDS * SHARDS, sequence_parallel)


def refused(file):
    rank, size = start(file)
    hvd.init()
    mesh, _ = islands()
    model = sharded(mesh)
    with pytest.raises(ValueError, match="Tensor is a DTensor, .*: call .to_local\\(\\) on it first"):
        hvd.allreduce(next(model.parameters()))
    with pytest.raises(ValueError, match="parameter 0.weight is a DTensor .*: leave out op=hvd.Sum"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), op=hvd.Sum)
    with pytest.raises(ValueError, match=f"ranks {rank} and {rank ^ 1} of the process set hold different parts"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1),
                                 process_set=process_set_of(mesh.get_group()))
    model = sharded(init_device_mesh("cpu", (size,)))
    with pytest.raises(ValueError, match="all 4 ranks hold one model together, .* use the torch optimizer as it is"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), algorithm="diloco")
    hvd.barrier()
    dist.destroy_process_group()


def test_parts_that_do_not_match(run_group):
    run_group(ISLANDS * SHARDS, refused)
