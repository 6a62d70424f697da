"""Lightning's Fabric over bagua_hvd."""
import lightning.fabric
import pytest
import torch
from torch import nn

import bagua_hvd.torch as hvd
from bagua_hvd import algorithms
from bagua_hvd.job import basics
from bagua_hvd.lightning import environment
from lightning_training import Model, data, ours, weights
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
    with pytest.raises(ValueError, match="takes none of its options, but got static_graph"):
        ours.BaguaFabricStrategy(static_graph=True)


def test_fabric(run_ranks, tmp_path):
    run_ranks(2, fabric, arguments={"folder": str(tmp_path)})


def test_the_port_is_one_of_those_that_the_user_allows(monkeypatch):
    monkeypatch.setenv("BAGUA_HVD_PORTS", str(port := free_port()))
    monkeypatch.setattr(basics, "init", lambda: None)
    monkeypatch.setattr(basics, "rank", lambda: 0)
    monkeypatch.setattr(environment, "broadcast_object", lambda mine, *_, **__: mine)
    assert environment.BaguarunEnvironment().main_port == port
