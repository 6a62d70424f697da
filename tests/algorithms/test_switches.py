"""BAGUA_OVERLAP, BAGUA_FUSION and BAGUA_HIERARCHY: each switches off one optimization of every algorithm."""
import pytest
import torch
from torch import nn

import bagua_hvd.torch as hvd

ALGORITHMS = ("gradient_allreduce", "bytegrad", "decentralized", "qadam")
LAYERS, STEPS = 3, 3
HOSTS = [{"BAGUA_HVD_HOST_ID": "a"}, {"BAGUA_HVD_HOST_ID": "a"}, {"BAGUA_HVD_HOST_ID": "b"}]


def model_and_optimizer(algorithm):
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))
    kind = torch.optim.Adam if algorithm == "qadam" else torch.optim.SGD
    optimizer = kind(model.parameters(), 0.01)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), algorithm=algorithm)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.full((2, 8), hvd.rank() + 1.0)).square().sum().backward()
    optimizer.step()


def watched(model, optimizer):
    """The events of one step: "communicate" for a posted operation, "last" for the last gradient."""
    events, context = [], hvd.mpi_ops._basics.context()
    post, kinds = type(context).post, []

    def watch(self, kind, *args, **named):
        events.append("communicate")
        kinds.append((kind, named.get("hierarchical", 0)))
        return post(self, kind, *args, **named)

    first = next(model.parameters())            # its gradient is the last of the backward pass
    hook = first.register_hook(lambda gradient: events.append("last"))
    type(context).post = watch
    try:
        step(model, optimizer)
    finally:
        type(context).post = post
        hook.remove()
    return events, kinds


def all_in_one(overlap, fusion, hierarchy):
    hvd.init()
    for algorithm in ALGORITHMS:
        model, optimizer = model_and_optimizer(algorithm)
        for _ in range(STEPS):
            step(model, optimizer)
        events, kinds = watched(model, optimizer)
        before, after = events[:events.index("last")], events[events.index("last"):]
        if not overlap:
            assert "communicate" not in before, (algorithm, events)
        elif not fusion:
            assert "communicate" in before, (algorithm, events)
        posts = (before + after).count("communicate")
        assert posts >= 2 * LAYERS if not fusion else posts < 2 * LAYERS, (algorithm, events)
        if algorithm in ("bytegrad", "qadam"):
            assert optimizer.algorithm.hierarchical == bool(hierarchy)
        if not hierarchy:
            assert not any(levels for _, levels in kinds), (algorithm, kinds)
        # With a learning rate of zero all ranks hold the same weights, where the algorithm guarantees it.
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        assert torch.isfinite(weights).all()
        if not optimizer.algorithm.models_differ:
            assert torch.equal(weights, hvd.broadcast(weights, 0)), algorithm
    hvd.barrier()


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("overlap", "fusion", "hierarchy"), [(1, 1, 1), (0, 1, 1), (1, 0, 1), (0, 0, 1), (1, 1, 0)])
def test_switches(run_ranks, overlap, fusion, hierarchy):
    env = {"BAGUA_OVERLAP": str(overlap), "BAGUA_FUSION": str(fusion), "BAGUA_HIERARCHY": str(hierarchy)}
    run_ranks(3, all_in_one, arguments={"overlap": overlap, "fusion": fusion, "hierarchy": hierarchy},
              env=[{**host, **env} for host in HOSTS], timeout=150)


def exact():
    hvd.init()
    model, optimizer = model_and_optimizer("gradient_allreduce")
    for _ in range(STEPS):
        step(model, optimizer)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    print("weights", weights.double().sum().item())


def test_exact_gradients_are_the_same_whatever_is_switched_off(run_ranks):
    """Two ranks, because the sum of two numbers does not depend on the order."""
    settings = ({}, {"BAGUA_OVERLAP": "0"}, {"BAGUA_FUSION": "0"}, {"BAGUA_HIERARCHY": "0"})
    sums = {run_ranks(2, exact, env=env)[0].output.split("weights ")[1].split()[0] for env in settings}
    assert len(sums) == 1, sums
