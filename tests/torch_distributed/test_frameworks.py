"""Libraries on torch.distributed with this backend: DDP, FSDP2, DCP checkpoints, torchmetrics."""
import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua_hvd.torch as hvd
from torch_group import start


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 30), nn.ReLU(), nn.Linear(30, 4))


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(16, 8, generator=generator)
    return x, x[:, :4].argmax(1)


def alone(size, steps):
    """The result of one process with the batches of all ranks."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(steps):
        optimizer.zero_grad()
        sum(nn.functional.cross_entropy(model(x), y) for x, y in (batch(rank, step) for rank in range(size))
            ).div(size).backward()
        optimizer.step()
    return model.state_dict()


def trained(model, rank, steps):
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(steps):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def fully_sharded(file, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, size = start(file)
    mesh = init_device_mesh("cpu", (size,))

    def sharded():
        model = net()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    for algorithm in ("gradient_allreduce", "diloco", "decentralized"):
        with pytest.raises(ValueError, match="all 2 ranks hold one model together, .* use the torch optimizer"):
            hvd.DistributedOptimizer(torch.optim.SGD(sharded().parameters(), 0.1), algorithm=algorithm)
    model = trained(sharded(), rank, 5)
    expected = alone(size, 5)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.full_tensor(), expected[name], atol=1e-5), name
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    saved = dcp.async_save({"model": get_model_state_dict(model)}, checkpoint_id=folder + " later")
    saved.result()
    fresh = sharded()
    state = {"model": get_model_state_dict(fresh)}
    dcp.load(state, checkpoint_id=folder + " later")
    set_model_state_dict(fresh, state["model"])
    for name, parameter in fresh.named_parameters():
        assert torch.allclose(parameter.full_tensor(), expected[name], atol=1e-5), name
    dist.destroy_process_group()


def tensor_parallel(file):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rank, size = start(file)
    model = parallelize_module(net(), init_device_mesh("cpu", (size,)),
                               {"0": ColwiseParallel(), "2": RowwiseParallel()})
    trained(model, 0, 5)            # all ranks have the same batches
    expected = alone(1, 5)
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        assert torch.allclose(whole, expected[name], atol=1e-5), name
    dist.barrier()
    dist.destroy_process_group()


def replicated(file):
    rank, size = start(file)
    model = nn.parallel.DistributedDataParallel(net(), bucket_cap_mb=0.001)
    trained(model, rank, 5)
    expected = alone(size, 5)
    for name, parameter in model.module.named_parameters():
        assert torch.allclose(parameter, expected[name], atol=1e-6), name
    dist.destroy_process_group()


def compiled(file):
    rank, size = start(file)
    model = nn.parallel.DistributedDataParallel(net())
    trained(torch.compile(model, backend="aot_eager"), rank, 3)
    expected = alone(size, 3)
    for name, parameter in model.module.named_parameters():
        assert torch.allclose(parameter, expected[name], atol=1e-6), name
    dist.destroy_process_group()


def metrics(file):
    import torchmetrics

    rank, size = start(file)
    metric, mean = torchmetrics.classification.MulticlassAccuracy(4, average="micro"), torchmetrics.MeanMetric()
    for step in range(2 + rank):                # as many batches as this rank has
        x, y = batch(rank, step)
        metric.update(x[:, :4].argmax(1) if step else y * 0, y)
        mean.update(float(rank), weight=1 + rank)
    hits = [(y == (x[:, :4].argmax(1) if step else y * 0)).float()
            for other in range(size) for step in range(2 + other) for x, y in [batch(other, step)]]
    assert torch.allclose(metric.compute(), torch.cat(hits).mean())
    weights = [(2 + other) * (1 + other) for other in range(size)]
    expected = sum(other * weight for other, weight in enumerate(weights)) / sum(weights)
    assert mean.compute().item() == pytest.approx(expected)
    dist.destroy_process_group()


def test_fsdp_and_its_checkpoint(run_group, tmp_path):
    run_group(2, fully_sharded, folder=str(tmp_path / "checkpoint"))


def test_tensor_parallelism(run_group):
    run_group(2, tensor_parallel)


def test_compiled_ddp(run_group):
    run_group(2, compiled)


def test_ddp_with_many_buckets(run_group):
    run_group(3, replicated)


@pytest.mark.skipif(not importlib.util.find_spec("torchmetrics"), reason="the package torchmetrics is not installed")
def test_torchmetrics(run_group):
    run_group(2, metrics)
