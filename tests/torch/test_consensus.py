"""hvd.consensus: the mean of the ranks' models, permanently or temporarily."""
import torch
from torch import nn

import bagua_hvd.torch as hvd

SUBSET = hvd.ProcessSet([0, 2])


class Model(nn.Module):
    """Shared weights, batch norm's buffers, channels_last, half precision, 0-d and empty parameters."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.norm = nn.BatchNorm1d(4)
        self.half = nn.Linear(2, 2).half()
        self.wide = nn.Linear(2, 2).double()
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("code", torch.zeros(3).to(torch.float8_e4m3fn))
        self.register_buffer("frozen", torch.zeros(5))
        self.register_buffer("mask", torch.full((2,), torch.finfo(torch.float32).min), persistent=False)


def filled(value):
    model = Model()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)
    return model


def assert_all(model, value, count):
    for name, tensor in model.state_dict().items():
        wanted = value if tensor.is_floating_point() and name != "code" else count
        assert (tensor == wanted).all(), (name, tensor)
    assert (model.mask == torch.finfo(torch.float32).min).all()      # a sum of these would be -inf
    assert model.one.weight is model.two.weight
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)


def everything():
    hvd.init(process_sets=[SUBSET])
    rank = hvd.rank()
    model = filled(rank)
    with hvd.consensus(model) as entered:
        assert entered is not None
        assert_all(model, 1, rank)                  # the mean of 0, 1, 2
    assert_all(model, rank, rank)
    try:
        with hvd.consensus(model):
            raise KeyError
    except KeyError:
        assert_all(model, rank, rank)               # the rank's own model returns, also after an error
    if SUBSET.included():
        hvd.consensus(model, process_set=SUBSET)
        assert_all(model, 1, rank)
    hvd.consensus(model)
    assert_all(model, 1, rank)
    hvd.consensus(nn.Module())                      # nothing to average


def test_consensus(run_ranks):
    run_ranks(3, everything)
