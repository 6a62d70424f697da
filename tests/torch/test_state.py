"""Saving, loading and broadcasting an optimizer's groups, to which schedulers refer, and its algorithm's state."""
import copy
import pickle
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import bagua_hvd.torch as hvd
from bagua_hvd.torch.wrapping import STATE_KEY, kept_in
from diloco import WHOLE, whole_diloco

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
SGD = torch.optim.SGD


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))


def wrap(model, parameters=None, named=True, **options):
    optimizer = SGD(list(model.parameters()) if parameters is None else parameters, lr=0.05)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters() if named else None, **options)


def train(model, optimizer, steps, scheduler=None):
    for step in steps:
        optimizer.zero_grad()
        inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
        (0.1 * model(inputs) - 1).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def assert_equal_on_all_ranks(tensor):
    torch.testing.assert_close(hvd.allgather(tensor[None]), tensor[None].expand(hvd.size(), -1), rtol=0, atol=0)


def schedules():
    hvd.init()
    lr = torch.optim.lr_scheduler
    for options in ({}, {"op": hvd.Adasum}):
        for rank0_only in (False, True):
            model = make_model()
            given = SGD(model.parameters(), lr=1.0, momentum=0.9)
            scheduler = lr.SequentialLR(given, [lr.LinearLR(given, 0.1, 1.0, 3), lr.ExponentialLR(given, 0.5)], [3])
            optimizer = hvd.DistributedOptimizer(given, model.named_parameters(), **options)
            used = []
            for step in range(7):
                if step == 4:
                    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
                    if hvd.rank() == 0 or not rank0_only:
                        optimizer.load_state_dict(saved[0])
                    scheduler.load_state_dict(saved[1])
                    hvd.broadcast_optimizer_state(optimizer, 0)
                used.append(optimizer.param_groups[0]["lr"])
                train(model, optimizer, [step], scheduler)
            assert used == pytest.approx([0.1, 0.4, 0.7, 1.0, 0.5, 0.25, 0.125])
            assert given.state is optimizer.state
            assert_equal_on_all_ranks(flat(model))
            # A group added later is scheduled, too; one added to the given optimizer only is an error.
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 8.0})
            assert given.param_groups is optimizer.param_groups and len(given.param_groups) == 2
    given = SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(given)
    given.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(RuntimeError, match=r"add_param_group\(\) of the DistributedOptimizer"):
        optimizer.step()


def test_schedulers_of_the_given_optimizer(run_ranks):
    run_ranks(2, schedules)


def momentum(state):
    """The momentum of DiLoCo's outer optimizer."""
    return [kept["shared"]["momentum"]["data"] for _, kept in kept_in(state)["state"]["weights"]]


def rank0_loads():
    hvd.init()
    for algorithm in (whole_diloco(4, full_steps=0), "gradient_allreduce",
                      hvd.algorithms.ByteGrad(error_feedback=True)):
        model = make_model()
        optimizer = wrap(model, algorithm=copy.deepcopy(algorithm))
        train(model, optimizer, range(8))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, range(8, 16))
        for loads, trained in ((1, 0), (1, 3), (2, 0), (2, 3)):     # how many ranks load; steps they have made before
            other = make_model(1)
            resumed = wrap(other, algorithm=copy.deepcopy(algorithm))
            train(other, resumed, range(trained))
            if hvd.rank() < loads:
                other.load_state_dict(saved[0])
                resumed.load_state_dict(saved[1])
            hvd.broadcast_parameters(other.state_dict(), 0)
            hvd.broadcast_optimizer_state(resumed, 0)
            assert resumed.reducer.model.step == (trained if algorithm == "gradient_allreduce" else 8)
            if isinstance(algorithm, hvd.algorithms.DiLoCo):
                assert momentum(resumed.state_dict()) == momentum(saved[1])
            train(other, resumed, range(8, 16))
            # Errors belong to ranks: if only one loads, they begin anew.
            exact = loads == 2 or not isinstance(algorithm, hvd.algorithms.ByteGrad)
            torch.testing.assert_close(flat(other), flat(model), rtol=0, atol=0 if exact else 0.05)
            assert_equal_on_all_ranks(flat(other))


def test_rank_0_loads_and_broadcasts(run_ranks):
    run_ranks(2, rank0_loads)


def page(folder):
    """Runs the code of docs/checkpoints.md."""
    import os

    hvd.init()
    os.makedirs(f"{folder}/{hvd.rank()}")
    os.chdir(f"{folder}/{hvd.rank()}")           # hosts without a shared disk
    save, load, mean = [compile(code, "checkpoints.md", "exec")
                        for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)]
    for algorithm in ("gradient_allreduce", "bytegrad", whole_diloco(4, full_steps=0)):
        model = make_model()
        optimizer = wrap(model, algorithm=algorithm)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        train(model, optimizer, range(8), scheduler)
        exec(save, {"hvd": hvd, "torch": torch, "os": os, "model": model, "optimizer": optimizer, "epoch": 8})
        train(model, optimizer, range(8, 16), scheduler)
        resumed = {"hvd": hvd, "torch": torch, "os": os, "model": make_model(1), "epoch": 0}
        resumed["optimizer"] = wrap(resumed["model"], algorithm=algorithm)
        exec(load, resumed)
        assert resumed["epoch"] == 8
        scheduler = torch.optim.lr_scheduler.ExponentialLR(resumed["optimizer"], 0.9, last_epoch=7)
        train(resumed["model"], resumed["optimizer"], range(8, 16), scheduler)
        torch.testing.assert_close(flat(resumed["model"]), flat(model), rtol=1e-6, atol=0)
    local = make_model(hvd.rank())
    exec(mean, {"hvd": hvd, "torch": torch, "model": local})
    if hvd.rank() == 0:
        saved = torch.load("model.pt")["0.weight"]
        torch.testing.assert_close(saved, (make_model(0)[0].weight + make_model(1)[0].weight).detach() / 2)


def test_code_of_the_page(run_ranks, tmp_path):
    run_ranks(2, page, arguments={"folder": str(tmp_path)})


def names():
    """A parameter's state is found by its name, at any place in the optimizer."""
    hvd.init()
    for algorithm in ("diloco", "powersgd"):
        make = SGD
        options = {"full_steps": 0, **({"communication_interval": 4, **WHOLE} if algorithm == "diloco" else {})}

        def wrapped(model, reverse, named, make=make, algorithm=algorithm, options=options):
            parameters = list(model.parameters())[::-1 if reverse else 1]
            named = {"no": None, "model": model.named_parameters(),
                     "reversed": reversed(list(model.named_parameters()))}[named]
            return hvd.DistributedOptimizer(make(parameters, lr=0.05), named,
                                            algorithm=hvd.algorithms.get(algorithm, **options))

        for before, after in ((("no", "model"), ("model", "reversed"), ("model", "model"))):
            model = make_model()
            optimizer = wrapped(model, True, before)
            train(model, optimizer, range(9))
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            train(model, optimizer, range(9, 18))
            other = make_model(1)
            resumed = wrapped(other, True, after)
            other.load_state_dict(saved[0])
            resumed.load_state_dict(saved[1])
            train(other, resumed, range(9, 18))
            torch.testing.assert_close(flat(other), flat(model), rtol=0, atol=1e-6)
        resumed = wrapped(other, True, "no")
        with pytest.raises(ValueError, match="for parameter 0.weight, and this optimizer has no parameter of"):
            resumed.load_state_dict(saved[1])


def test_state_is_found_by_name(run_ranks):
    run_ranks(2, names)


def grown():
    """Parameters added during the saved training are loaded by an optimizer with another order."""
    hvd.init()

    def wrapped(model, first):
        return hvd.DistributedOptimizer(SGD([{"params": model[i].parameters()} for i in first], lr=0.05),
                                        [pair for pair in model.named_parameters() if int(pair[0][0]) in first],
                                        algorithm=whole_diloco(4, full_steps=0))

    def begun():
        model = make_model()
        model[0].requires_grad_(False)
        optimizer = wrapped(model, [1, 0])
        train(model, optimizer, range(3))
        model[0].requires_grad_(True)
        train(model, optimizer, range(3, 9))
        return model, optimizer

    def added():
        model = make_model()
        optimizer = wrapped(model, [1])
        train(model, optimizer, range(3))
        optimizer.add_param_group({"params": model[0].parameters()})
        train(model, optimizer, range(3, 9))
        return model, optimizer

    for make in (begun, added):
        model, optimizer = make()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, range(9, 18))
        other = make_model(1)
        resumed = wrapped(other, [1, 0])
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        train(other, resumed, range(9, 18))
        torch.testing.assert_close(flat(other), flat(model), rtol=0, atol=1e-6)


def test_parameters_that_came_later(run_ranks):
    run_ranks(2, grown)


def copies(folder):
    hvd.init()
    model = make_model()
    for options in ({}, {"op": hvd.Adasum}):
        optimizer = wrap(model, **options)
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"cannot be copied or pickled.* save its state_dict\(\)"):
                copied(optimizer)
        with optimizer.no_sync():
            model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert (optimizer.reducer, optimizer.algorithm) == (None, None)         # with Adasum there are none
    # torch.distributed.checkpoint rebuilds a state_dict from groups and states.
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    algorithm = whole_diloco(4, full_steps=0)
    optimizer = wrap(model, algorithm=algorithm)
    train(model, optimizer, range(9))
    path = f"{folder}/{hvd.rank()}"
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path, no_dist=True)
    resumed = wrap(model, algorithm=algorithm)
    saved = get_optimizer_state_dict(model, resumed)
    dcp.load({"optimizer": saved}, checkpoint_id=path, no_dist=True)
    set_optimizer_state_dict(model, resumed, saved)
    assert kept_in(resumed.state_dict()) == kept_in(optimizer.state_dict())
    assert STATE_KEY not in resumed.param_groups[0]
    # Loaded before wrapping.
    given = SGD(model.parameters(), lr=0.05)
    given.load_state_dict(optimizer.state_dict())
    resumed = hvd.DistributedOptimizer(given, model.named_parameters(), algorithm=algorithm)
    assert kept_in(resumed.state_dict()) == kept_in(optimizer.state_dict())


def test_copies_and_other_checkpoints(run_ranks, tmp_path):
    run_ranks(2, copies, arguments={"folder": str(tmp_path)})


def of_another_algorithm():
    hvd.init()
    model = make_model()
    saving = wrap(model, algorithm="powersgd")
    train(model, saving, range(2))
    saved = saving.state_dict()
    for algorithm, name in (("powersgd", None), ("doublesqueeze", "DoubleSqueeze"), (None, "GradientAllReduce")):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            loading = wrap(model, algorithm=algorithm)
            loading.load_state_dict(saved)
        assert [str(each.message) for each in warned] == [
            f"the checkpoint holds the state of PowerSGD, this optimizer runs {name}, which starts without state"
        ] * (name is not None and hvd.rank() == 0), algorithm


def test_a_checkpoint_of_another_algorithm(run_ranks):
    run_ranks(2, of_another_algorithm)


def test_a_state_holds_no_code():
    state = {"param_groups": [{STATE_KEY: pickle.dumps({"state": nn.Linear(1, 1)}, 4)}]}
    with pytest.raises(pickle.UnpicklingError, match="which bagua_hvd never saves"):
        kept_in(state)
