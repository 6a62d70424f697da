"""Buckets follow the order in which the first backward pass makes gradients ready, not that of the parameters."""
import torch
from torch import nn

import bagua_hvd.torch as hvd
from bagua_hvd import algorithms
from bagua_hvd.core import native
from bagua_hvd.reduction.window import Layout
from bagua_hvd.training.buckets import Member
from bagua_hvd.training.model import Model
from bagua_hvd.training.source import Source

WIDTH = 64
SMALL_BUCKETS = {"BAGUA_DEFAULT_BUCKET_SIZE": str(2 * 4 * WIDTH * WIDTH)}       # two layers each


class Scrambled(nn.Module):
    """Four layers, used neither in the order of their parameters nor in reverse."""

    def __init__(self, order):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in order)
        self.order = order

    def forward(self, x):
        for index in self.order:
            x = torch.tanh(self.layers[index](x))
        return x


def make(order, algorithm="gradient_allreduce"):
    torch.manual_seed(0)
    model = Scrambled(order)
    return model, hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), algorithm=algorithm)


def train(model, optimizer, steps):
    for step in range(steps):
        torch.manual_seed(10 * step + hvd.rank())
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def plan(optimizer):
    return [list(bucket.members) for bucket in optimizer.reducer.buckets]


def same_everywhere(values):
    return all(row.tolist() == values.tolist() for row in hvd.allgather(values[None]))


def follows_the_first_backward_pass():
    hvd.init()
    model, optimizer = make([2, 0, 3, 1])
    assert plan(optimizer) == [[3, 2], [1, 0]]
    assert same_everywhere(train(model, optimizer, 3))
    assert plan(optimizer) == [[1, 3], [0, 2]]
    # Existing buckets do not change.
    buckets = list(optimizer.reducer.buckets)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(WIDTH))]})
    train(model, optimizer, 2)
    assert optimizer.reducer.buckets[:-1] == buckets and plan(optimizer)[-1] == [4]


def ranks_may_differ():
    hvd.init()
    orders = [[2, 0, 3, 1], [0, 1, 2, 3], [3, 1, 2, 0]]
    model, optimizer = make(orders[hvd.rank()])
    assert same_everywhere(train(model, optimizer, 3))
    assert len(set(hvd.allgather_object(str(plan(optimizer))))) == 1


def a_checkpoint_brings_its_buckets():
    hvd.init()
    model, optimizer = make([2, 0, 3, 1], "doublesqueeze")
    train(model, optimizer, 2)
    saved, weights = optimizer.state_dict(), model.state_dict()
    weights = {name: value.clone() for name, value in weights.items()}
    expected = train(model, optimizer, 3)
    model, optimizer = make([2, 0, 3, 1], "doublesqueeze")
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    assert plan(optimizer) == [[1, 3], [0, 2]]
    assert train(model, optimizer, 3).tolist() == expected.tolist()     # with the saved error feedback


def the_users_groups_stay():
    hvd.init()
    model = Scrambled([2, 0, 3, 1])
    groups = [[model.layers[0].weight, model.layers[3].weight], [model.layers[1].weight]]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), groups=groups)
    train(model, optimizer, 2)
    assert plan(optimizer) == [[0, 3], [1], [2]]


def test_follows_the_first_backward_pass(run_ranks):
    run_ranks(2, follows_the_first_backward_pass, env=SMALL_BUCKETS)


def test_ranks_may_differ(run_ranks):
    run_ranks(3, ranks_may_differ, env=SMALL_BUCKETS)


def test_a_checkpoint_brings_its_buckets(run_ranks):
    run_ranks(2, a_checkpoint_brings_its_buckets, env=SMALL_BUCKETS)


def test_the_users_groups_stay(run_ranks):
    run_ranks(2, the_users_groups_stay, env=SMALL_BUCKETS)


def test_no_bucket_is_empty():
    """A sparse gradient leaves a group for itself: the other names keep their numbers."""
    model = Model("weights", Source(), None, algorithms.get("gradient_allreduce"))
    layout = Layout(model, 1.0, 1.0)
    layout.rename("gradients")
    members = [Member(str(place), (2,), native.FLOAT32) for place in range(3)]
    layout.add(members, [[0], [1, 2]])
    layout.remove(0)
    layout.add(members[:1], [])
    assert [(bucket.name, list(bucket.members)) for bucket in model.gradients] == [
        ("gradients.0", [1, 2]), ("gradients.1", [3])]
