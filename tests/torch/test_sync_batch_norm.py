"""SyncBatchNorm on real ranks, against one torch BatchNorm over the concatenated batch."""
import copy

import pytest
import torch
from torch import nn

import bagua_hvd.torch as hvd
from bagua_hvd.job.basics import runtime

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
C = 5
# (rows on each rank, the other dimensions): uneven, one rank empty, one row each.
CASES = [([3, 7], ()), ([2, 5], (6,)), ([4, 1], (3, 5)), ([2, 3], (2, 3, 2)), ([0, 4], (3, 2)), ([6, 0], ()),
         ([1, 1], ())]


def data_of(rows, trailing, dtype=torch.float32, seed=0):
    """Input and upstream gradient of every rank; channels of different scale and far from 0."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sum(rows), C, *trailing)
    per_channel = torch.arange(1.0, C + 1).view(-1, *[1] * len(trailing))
    x = torch.randn(shape, generator=generator) * per_channel + 3 * per_channel
    dy = torch.randn(shape, generator=generator)
    return x.to(dtype).split(rows), dy.to(dtype).split(rows)


def make_pair(ndim, **options):
    """A SyncBatchNorm and torch's own, with equal parameters other than 1 and 0."""
    sync, plain = hvd.SyncBatchNorm(C, **options), PLAIN[ndim](C, **options)
    if sync.affine:
        with torch.no_grad():
            for module in (sync, plain):
                module.weight.copy_(torch.linspace(0.5, 2, C))
                module.bias.copy_(torch.linspace(-1, 1, C))
    return sync, plain


def check(rows, trailing, steps=2, channels_last=False, **options):
    sync, plain = make_pair(2 + len(trailing), **options)
    rank = hvd.rank()
    for step in range(steps):
        xs, dys = data_of(rows, trailing, seed=step)
        x, whole = xs[rank].clone(), torch.cat(xs).requires_grad_()
        if channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        x.requires_grad_()
        y, expected = sync(x), plain(whole)
        assert y.shape == x.shape and y.dtype == x.dtype
        if channels_last:
            assert y.is_contiguous(memory_format=torch.channels_last)
        y.backward(dys[rank])
        expected.backward(torch.cat(dys))
        torch.testing.assert_close(y, expected.split(rows)[rank], **TOLERANCE)
        torch.testing.assert_close(x.grad, whole.grad.split(rows)[rank], **TOLERANCE)
    for parameter, its in zip(sync.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(hvd.allreduce(parameter.grad, op=hvd.Sum), its.grad, **TOLERANCE)
    for buffer, its in zip(sync.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(buffer, its, **TOLERANCE)
    sync.eval()
    plain.eval()
    if rank == 0:       # eval is local: the other rank takes no part
        x = data_of(rows, trailing)[0][0]
        torch.testing.assert_close(sync(x), plain(x), **TOLERANCE)


def check_dtypes():
    rank, rows = hvd.rank(), [3, 5]
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 5e-2), (torch.float16, 1e-2)):
        sync, plain = make_pair(4)
        sync.to(dtype)
        plain.double()
        xs, dys = data_of(rows, (4, 4), dtype)
        x, whole = xs[rank].clone().requires_grad_(), torch.cat(xs).double().requires_grad_()
        y, expected = sync(x), plain(whole)
        y.backward(dys[rank])
        expected.backward(torch.cat(dys).double())
        assert y.dtype == x.grad.dtype == sync.weight.grad.dtype == dtype
        for actual, its in ((y, expected), (x.grad, whole.grad)):
            torch.testing.assert_close(actual.double(), its.split(rows)[rank], rtol=tolerance, atol=tolerance)
    # Half-precision inputs with float32 parameters, as under autocast.
    sync, _ = make_pair(4)
    x = data_of(rows, (4, 4), torch.bfloat16)[0][rank].requires_grad_()
    sync(x).sum().backward()
    assert x.grad.dtype == torch.bfloat16 and sync.weight.grad.dtype == torch.float32


def check_large_mean():
    """A naive sum of squares would lose all digits."""
    rank, rows = hvd.rank(), [50, 70]
    x = torch.randn(sum(rows), C, generator=torch.Generator().manual_seed(0)) + 3000
    sync, _ = make_pair(2, affine=False)
    expected = nn.BatchNorm1d(C, affine=False).double()
    torch.testing.assert_close(sync(x.split(rows)[rank]).double(), expected(x.double()).split(rows)[rank], rtol=1e-3,
                               atol=1e-3)
    torch.testing.assert_close(sync.running_var.double(), expected.running_var, **TOLERANCE)


def check_few_collectives():
    sync = hvd.SyncBatchNorm(C)
    x = torch.randn(4, C, 3, 3, requires_grad=True)
    sync(x).sum().backward()
    before = runtime.context.counters().operations
    sync(x).sum().backward()
    assert runtime.context.counters().operations - before == 2
    # A first layer's input needs no gradient, so its backward communicates nothing.
    sync(x.detach()).sum().backward()
    assert runtime.context.counters().operations - before == 3


def check_errors():
    sync = hvd.SyncBatchNorm(C)
    with pytest.raises(ValueError, match="2D"):
        sync(torch.ones(C))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        sync(torch.ones(1 - hvd.rank(), C))
    assert sync(torch.ones(0, C)).shape == (0, C)       # no rank has samples
    assert int(sync.num_batches_tracked) == 0 and sync.running_var.equal(torch.ones(C))


def training_with_optimizer():
    """A whole training: conversion, DistributedOptimizer, three steps; equal to one process on all data."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Conv2d(2, C, 3), nn.BatchNorm2d(C), nn.ReLU(), nn.Flatten(), nn.Linear(C * 4, 2))
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(reference))
    assert type(model[1]) is hvd.SyncBatchNorm
    opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        batches = torch.randn(2, 3, 2, 4, 4, generator=torch.Generator().manual_seed(step))
        opt.zero_grad()
        model(batches[hvd.rank()]).square().mean().backward()
        opt.step()
        plain.zero_grad()
        reference(batches.flatten(0, 1)).square().mean().backward()
        plain.step()
    for actual, expected in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(actual, expected, **TOLERANCE)


def everything():
    hvd.init()
    for rows, trailing in CASES:
        check(rows, trailing)
    check([2, 3], (4, 4), channels_last=True)
    check([2, 3], (4, 4), momentum=None)
    check([2, 3], (4, 4), affine=False)
    check([2, 3], (4, 4), track_running_stats=False)
    check_dtypes()
    check_large_mean()
    check_few_collectives()
    check_errors()
    training_with_optimizer()


def three_ranks():
    hvd.init()
    check([2, 0, 5], (3,))
    check([0, 0, 5], (3, 3))


def test_equals_one_batch_norm(run_ranks):
    run_ranks(2, everything)
    run_ranks(3, three_ranks)


def test_one_rank_is_torchs_own():
    hvd.init()
    try:
        sync, plain = make_pair(4)
        x = torch.randn(3, C, 4, 4)
        assert sync(x).equal(plain(x))
        assert all(a.equal(b) for a, b in zip(sync.buffers(), plain.buffers(), strict=True))
    finally:
        hvd.shutdown()


def test_before_init():
    hvd.shutdown()
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.SyncBatchNorm(C)(torch.ones(2, C))
    assert hvd.SyncBatchNorm(C).eval()(torch.ones(2, C)).shape == (2, C)


def test_convert_finds_a_layer_in_each_of_its_places():
    norm = nn.BatchNorm1d(4)
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(norm, nn.Linear(4, 4), nn.Sequential(norm)))
    assert isinstance(model[0], hvd.SyncBatchNorm) and model[2][0] is model[0]


def test_convert_refuses_layers_without_features():
    with pytest.raises(ValueError, match="LazyBatchNorm1d does not know its features yet"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()))


class Activated(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


class Named(nn.BatchNorm1d):
    """Only its name is another."""


def test_convert_refuses_layers_with_a_forward_of_their_own():
    patched = nn.BatchNorm1d(4)
    patched.forward = lambda x: x
    for norm in (Activated(4), patched):
        with pytest.raises(ValueError, match=f"{type(norm).__name__} has its own forward"):
            hvd.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(norm))
    for norm in (Named(4), nn.SyncBatchNorm(4)):
        assert type(hvd.SyncBatchNorm.convert_sync_batchnorm(norm)) is hvd.SyncBatchNorm


def test_convert_keeps_everything():
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=0.3, eps=1e-3), nn.Sequential(nn.BatchNorm2d(4, affine=False)),
                          nn.BatchNorm1d(2, track_running_stats=False), nn.InstanceNorm2d(2))
    model[0].eval()
    old = list(model.children())
    keys = model.state_dict().keys()
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(model) is model
    assert [type(m) for m in (model[0], model[1][0], model[2])] == [hvd.SyncBatchNorm] * 3
    assert model[3] is old[3]
    assert model[0].weight is old[0].weight and model[0].running_mean is old[0].running_mean
    assert (model[0].momentum, model[0].eps, model[0].training, model[2].training) == (0.3, 1e-3, False, True)
    assert model[1][0].weight is None and model[2].running_mean is None
    assert model.state_dict().keys() == keys
    assert isinstance(hvd.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2)), hvd.SyncBatchNorm)
