"""Broadcasts of parameters, optimizer state and objects."""
import collections
import threading

import pytest
import torch

import bagua_hvd.torch as hvd


def same(value, what=""):
    """Asserts that all ranks hold the same tensor."""
    everywhere = hvd.allgather(value.detach().reshape(1, -1))
    assert torch.equal(everywhere, everywhere[:1].expand_as(everywhere)), what


def model_of(rank):
    torch.manual_seed(rank)
    return torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(),
                               torch.nn.Linear(4 * 3 * 3, 2))


def parameters():
    hvd.init()
    rank, root = hvd.rank(), hvd.size() - 1
    for form in (lambda m: m.state_dict(), lambda m: list(m.named_parameters()), lambda m: list(m.parameters()),
                 lambda m: collections.OrderedDict(m.named_parameters())):
        for layout in (torch.contiguous_format, torch.channels_last):
            model, reference = model_of(rank).to(memory_format=layout), model_of(root)
            storages = [p.data_ptr() for p in model.parameters()]
            hvd.broadcast_parameters(form(model), root)
            for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.equal(mine, expected)
            assert [p.data_ptr() for p in model.parameters()] == storages
    for wrong in (model.named_parameters(), model.parameters(), {1, 2}, 3):
        with pytest.raises(ValueError, match="invalid params"):
            hvd.broadcast_parameters(wrong, 0)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.5, betas=(0.8, 0.9), amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, weight_decay=0.3),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "asgd": lambda p: torch.optim.ASGD(p),
}


def train(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((4, 2, 5, 5), float(step))).square().sum().backward()
        optimizer.step()


def flat_state(optimizer):
    state = optimizer.state_dict()
    return {(i, key): value for i, entry in state["state"].items() for key, value in entry.items()}, [
        {key: value for key, value in group.items()} for group in state["param_groups"]
    ]


def optimizer_state():
    hvd.init()
    rank, root = hvd.rank(), 0
    for name, make in OPTIMIZERS.items():
        for root_steps, other_steps in [(0, 0), (2, 0), (2, 3), (0, 2)]:
            model = model_of(7)
            optimizer = make(model.parameters())
            train(model, optimizer, root_steps if rank == root else other_steps)
            if rank != root:
                optimizer.param_groups[0]["lr"] = 123.0
            weights = [p.detach().clone() for p in model.parameters()]
            hvd.broadcast_optimizer_state(optimizer, root)
            for before, after in zip(weights, model.parameters(), strict=True):
                assert torch.equal(before, after), "broadcast_optimizer_state moved a parameter"
            # The reference repeats the root's steps on this rank.
            reference_model = model_of(7)
            reference = make(reference_model.parameters())
            train(reference_model, reference, root_steps)
            (state, groups), (expected_state, expected_groups) = flat_state(optimizer), flat_state(reference)
            assert groups == expected_groups, (name, groups, expected_groups)
            assert [{k: type(v) for k, v in g.items()} for g in groups] == [
                {k: type(v) for k, v in g.items()} for g in expected_groups
            ]
            assert state.keys() == expected_state.keys(), (name, root_steps, other_steps)
            for key, value in expected_state.items():
                assert type(state[key]) is type(value), (name, key)
                if isinstance(value, torch.Tensor):
                    assert torch.equal(state[key], value), (name, key)
                else:
                    assert state[key] == value, (name, key)
            hvd.broadcast_parameters(model.state_dict(), root)
            train(model, optimizer, 1)          # the state is usable and stays equal
            for p in model.parameters():
                same(p, name)
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))]), root)
    two = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    hvd.broadcast_optimizer_state(torch.optim.SGD([two[0]], lr=0.1), root)
    # Parameters without gradients have no state.
    two[0].requires_grad_(False)
    optimizer = torch.optim.Adam(two)
    two[1].sum().backward()
    optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root)
    assert len(optimizer.state_dict()["state"]) == 1
    if hvd.size() > 1:          # all ranks raise if one has other groups
        both = [[two[0]], [two[1]]] if rank == hvd.size() - 1 else [list(two)]
        optimizer = torch.optim.SGD([{"params": group} for group in both], lr=0.1)
        with pytest.raises(ValueError, match=r"of \[2\]" if len(both) == 2 else "another rank"):
            hvd.broadcast_optimizer_state(optimizer, root)
        last = rank == hvd.size() - 1
        optimizer = (torch.optim.Adam if last else torch.optim.SGD)([two[0]], lr=0.1)
        with pytest.raises(ValueError, match="optimizer SGD, but this rank has Adam" if last else "another optimizer"):
            hvd.broadcast_optimizer_state(optimizer, root)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([two[1]], 0.1), algorithm="topk" if last else "powersgd")
        sentence = "has the optimizer SGD with PowerSGD, but this rank has SGD with TopK"
        with pytest.raises(ValueError, match=sentence if last else "another optimizer"):
            hvd.broadcast_optimizer_state(optimizer, root)


def state_of_no_parameter():
    """Keys that are no parameters, as "global" of some optimizers: those of the root, on every rank."""
    hvd.init()
    rank = hvd.rank()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.state["global"] = {"norms": torch.full((3,), float(rank)), "steps": rank}
    optimizer.state["mean"] = torch.full((rank + 1,), float(rank))
    optimizer.state["of this rank" if rank else "of the root"] = rank
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.state.keys() == {"global", "mean", "of the root"}
    assert optimizer.state["global"]["norms"].tolist() == [0, 0, 0] and optimizer.state["global"]["steps"] == 0
    assert optimizer.state["mean"].tolist() == [0] and optimizer.state["of the root"] == 0
    empty = torch.optim.SGD([{"params": []}], lr=1.0 + rank)
    hvd.broadcast_optimizer_state(empty, 0)
    assert empty.param_groups[0]["lr"] == 1


class Local:
    """Pickled by reference to this module, which every rank has."""

    def __init__(self, value):
        self.value = value


def python_objects():
    hvd.init()
    rank, n = hvd.rank(), hvd.size()
    root = n - 1
    original = {"rank": rank, "nested": [(1, None), {"x": 2.5}], "tensor": torch.arange(3), "text": "\u00e4" * 1000}
    received = hvd.broadcast_object(original, root)
    assert received["rank"] == root and received["nested"] == original["nested"]
    assert torch.equal(received["tensor"], original["tensor"])
    assert (received is original) == (rank == root)
    # The other ranks' arguments are ignored, also if their class differs.
    assert hvd.broadcast_object(3.5 if rank == 0 else None) == 3.5
    assert hvd.broadcast_object(b"x" * 3_000_000 if rank == 0 else None, name="large") == b"x" * 3_000_000
    assert hvd.broadcast_object(lambda x: x + rank, root)(1) == 1 + root
    assert hvd.broadcast_object(Local(rank), root).value == root
    gathered = hvd.allgather_object(["x"] * rank)
    assert gathered == [["x"] * r for r in range(n)]
    assert [function() for function in hvd.allgather_object(lambda: rank, name="lambdas")] == list(range(n))
    assert hvd.allgather_object(rank if rank else None) == [None, *range(1, n)]
    sizes = 0, 488, 489, 490, 500, 1000       # pickled: around 504 bytes, the most that is sent with the size
    assert [hvd.broadcast_object(b"x" * size if rank == root else None, root, f"{size}") for size in sizes] == [
        b"x" * size for size in sizes]
    # One round trip each, because a replacement of a lost rank waits for many.
    before = hvd.statistics().total.operations
    hvd.broadcast_object({"epoch": 3, "batch": 14}, root)
    hvd.allgather_object("x" * 1000)
    assert hvd.statistics().total.operations == before + 2
    expected = TypeError if rank == root else hvd.HorovodInternalError      # all ranks get an error, and continue
    for call in (lambda obj: hvd.broadcast_object(obj, root), hvd.allgather_object):
        with pytest.raises(expected, match="^cannot pickle" if rank == root else (
                f"rank {root} could not serialize its object: TypeError: cannot pickle .*lock")):
            call(threading.Lock() if rank == root else 1)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_parameters(run_ranks, n):
    run_ranks(n, parameters)


@pytest.mark.parametrize("n", [1, 2])
def test_optimizer_state(run_ranks, n):
    run_ranks(n, optimizer_state)


def test_state_of_no_parameter(run_ranks):
    run_ranks(2, state_of_no_parameter)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_python_objects(run_ranks, n):
    run_ranks(n, python_objects)


def test_compression():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        compressed, context = hvd.Compression.fp16.compress(torch.ones(3, dtype=dtype))
        assert compressed.dtype == torch.float16
        assert hvd.Compression.fp16.decompress(compressed, context).dtype == dtype
    integers = torch.ones(3, dtype=torch.int64)
    compressed, context = hvd.Compression.fp16.compress(integers)
    assert compressed is integers and hvd.Compression.fp16.decompress(compressed, context) is integers
    compressed, context = hvd.Compression.none.compress(integers)
    assert compressed is integers and hvd.Compression.none.decompress(compressed, context) is integers
