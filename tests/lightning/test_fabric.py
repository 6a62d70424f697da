"""Lightning's Fabric over bagua_hvd."""
import gc

import lightning.fabric
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bagua_hvd.torch as hvd
from bagua_hvd import algorithms
from bagua_hvd.job import basics
from bagua_hvd.lightning import environment
from lightning_training import Model, data, ours, trainer, weights
from ports import free_port


def train(strategy, steps=6, accumulate=1, clip=None):
    hvd.init()
    fabric = lightning.fabric.Fabric(accelerator="cpu", devices=hvd.size(), strategy=strategy)
    fabric.launch()
    model = Model().layers
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), 0.02))
    loader = fabric.setup_dataloaders(data())
    step = 0
    while step < steps * accumulate:
        for x, y in loader:
            step += 1
            with fabric.no_backward_sync(model, enabled=step % accumulate != 0):
                fabric.backward(nn.functional.cross_entropy(model(x), y) / accumulate)
            if step % accumulate == 0:
                if clip:
                    fabric.clip_gradients(model, optimizer, max_norm=clip)
                optimizer.step()
                optimizer.zero_grad()
            if step == steps * accumulate:
                break
    return fabric, model, optimizer


def fabric(folder):
    ddp = lightning.fabric.strategies.DDPStrategy
    for options in ({}, {"accumulate": 2}, {"clip": 0.1}, {"accumulate": 2, "clip": 0.1}):
        _, theirs, _ = train(ddp(cluster_environment=ours.BaguarunEnvironment()), **options)
        _, model, _ = train("bagua", **options)
        assert torch.allclose(weights(theirs), weights(model), atol=2e-5), options
    for name in algorithms.menu():
        before = Model().loss(next(iter(data(64, 64)))).item()
        run, model, optimizer = train(f"bagua_{name}", 12)
        run.save(f"{folder}/{name}.ckpt", {"model": model, "optimizer": optimizer})
        saved = torch.load(f"{folder}/{name}.ckpt", weights_only=False)
        fresh = Model().layers
        fresh.load_state_dict(saved["model"])
        hvd.consensus(model)
        assert torch.allclose(weights(fresh), weights(model), atol=1e-6), name
        x, y = next(iter(data(64, 64)))
        assert nn.functional.cross_entropy(fresh(x), y).item() < before, name
        run.load(f"{folder}/{name}.ckpt", {"model": model, "optimizer": optimizer}, weights_only=False)
        if optimizer.algorithm.asynchronous:
            optimizer.algorithm.abort()
    with pytest.raises(ValueError, match="so its options have no effect: remove static_graph"):
        ours.BaguaFabricStrategy(static_graph=True)


def test_fabric(run_ranks, tmp_path):
    run_ranks(2, fabric, arguments={"folder": str(tmp_path)})


class Seeing(Model):
    """Keeps the samples that it gets."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, index):
        self.seen += batch[0][:, 0].tolist()
        return super().loss(batch)


def samplers():
    """Lightning does not divide the share of a sampler that divides the samples itself."""
    rows = TensorDataset(torch.arange(32.0).unsqueeze(1).expand(32, 12), torch.zeros(32, dtype=torch.long))
    hvd.init()
    for make in (lambda: hvd.LoadBalancingDistributedSampler(rows, complexities=range(32)),
                 lambda: hvd.elastic.ElasticSampler(rows)):
        model = Seeing()
        trainer("bagua", -1, max_epochs=2).fit(model, DataLoader(rows, 4, sampler=make()))
        run = lightning.fabric.Fabric(accelerator="cpu", devices=hvd.size(), strategy="bagua")
        run.launch()
        loader = run.setup_dataloaders(DataLoader(rows, 4, sampler=make()))
        epochs = [[x for batch in loader for x in batch[0][:, 0].tolist()] for _ in range(2)]
        for first, second in ((model.seen[:16], model.seen[16:]), epochs):
            for epoch in (first, second):
                assert sorted(hvd.allgather(torch.tensor(epoch)).tolist()) == list(range(32))
            assert first != second


def test_samplers(run_ranks):
    run_ranks(2, samplers)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.late = nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x):
        return self.one(x) + self.late(x)


def several():
    """Equal names in two modules, groups added later, optimizers that replace others, and state without algorithms'."""
    hvd.init()
    run = lightning.fabric.Fabric(accelerator="cpu", devices=hvd.size(), strategy="bagua")
    run.launch()
    first, second = run.setup_module(Model().layers), run.setup_module(Model().layers)
    both = run.setup_optimizers(torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1))
    module = run.setup_module(Two())
    x = torch.full((3, 12), hvd.rank() + 1.0)
    for _ in range(2):
        optimizer = run.setup_optimizers(torch.optim.SGD(module.one.parameters(), 0.1))
        for step in range(3):
            if step == 1:
                optimizer.add_param_group({"params": list(module.late.parameters())})
            optimizer.zero_grad()
            both.zero_grad()
            run.backward((first(x) + second(x) + module(x)).square().mean())
            optimizer.step()
            both.step()
        for each in (first, second, module):
            everyone = hvd.allgather(weights(each)[None])
            assert (everyone == everyone[0]).all()
        del optimizer
    gc.collect()
    assert list(run.strategy._wrapped) == [both.optimizer]
    if hvd.rank() == 0:
        assert run.strategy.get_optimizer_state(both.optimizer)["param_groups"][0]["lr"] == 0.1


def test_several(run_ranks):
    run_ranks(2, several)


def test_the_port_is_one_of_those_that_the_user_allows(monkeypatch):
    monkeypatch.setenv("BAGUA_HVD_PORTS", str(port := free_port()))
    monkeypatch.setattr(basics, "init", lambda: None)
    monkeypatch.setattr(basics, "rank", lambda: 0)
    monkeypatch.setattr(environment, "broadcast_object", lambda mine, *_, **__: mine)
    assert environment.BaguarunEnvironment().main_port == port
