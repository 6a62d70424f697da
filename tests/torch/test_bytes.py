"""Complex and 8-bit floating tensors, which the core cannot add, in collectives that only move data."""
import pytest
import torch
from torch import nn

import bagua_hvd.torch as hvd

DTYPES = [torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint32, torch.uint64]


def tensor_of(rank, dtype, shape=(3, 2)):
    values = torch.arange(6, dtype=torch.float32).reshape(shape) + 10 * rank
    return torch.complex(values, -values).to(dtype) if dtype.is_complex else values.to(dtype)


def assert_same(actual, expected):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert actual.contiguous().view(torch.uint8).equal(expected.contiguous().view(torch.uint8))


def joined(tensors):
    """torch.cat for all dtypes, because it lacks unsigned ones."""
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)


def moved():
    hvd.init()
    rank, n = hvd.rank(), hvd.size()
    for dtype in DTYPES:
        mine, everyones = tensor_of(rank, dtype), [tensor_of(r, dtype) for r in range(n)]
        assert_same(hvd.allgather(mine), joined(everyones))
        for gathered in hvd.grouped_allgather([mine, mine[:rank]]), hvd.synchronize(
                hvd.grouped_allgather_async([mine, mine[:rank]])):
            assert_same(gathered[0], joined(everyones))
            assert_same(gathered[1], joined([tensor[:r] for r, tensor in enumerate(everyones)]))
        assert_same(hvd.broadcast(mine, 1), everyones[1])
        scalar = mine[0, 0].clone()
        assert hvd.broadcast_(scalar, 1) is scalar
        assert_same(scalar[None], everyones[1][0, :1])
        received, splits = hvd.alltoall(mine, splits=[1] * n)
        assert_same(received, joined([tensor[rank:rank + 1] for tensor in everyones]))
        assert splits.tolist() == [1] * n
        for reduce in hvd.allreduce, hvd.reducescatter:
            with pytest.raises(ValueError, match=r"Tensor type .* is not supported"):
                reduce(mine)
    with pytest.raises(ValueError, match=r"call \.resolve_conj\(\)"):
        hvd.allgather(tensor_of(0, torch.complex64).conj())
    for over_rows in hvd.allgather, hvd.alltoall, lambda scalar: hvd.grouped_allgather([scalar]):
        with pytest.raises(hvd.HorovodInternalError, match="rank-zero tensor"):
            over_rows(torch.tensor(1j))
    freed = tensor_of(0, torch.complex64)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="its storage has been freed"):
        hvd.allgather(freed)


@pytest.mark.parametrize("n", [2, 3])
def test_moved(run_ranks, n):
    run_ranks(n, moved)


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"seen": 1}

    def set_extra_state(self, state):
        """Unused."""


def parameters():
    hvd.init()
    model = nn.Linear(2, 2)
    for name, dtype in (("c", torch.complex64), ("f", torch.float8_e4m3fn), ("u", torch.uint32)):
        model.register_buffer(name, tensor_of(hvd.rank(), dtype))
    model.register_buffer("conjugate", tensor_of(hvd.rank(), torch.complex64).conj())
    hvd.broadcast_parameters(model.state_dict(), 1)
    for name, dtype in (("c", torch.complex64), ("f", torch.float8_e4m3fn), ("u", torch.uint32)):
        assert_same(getattr(model, name), tensor_of(1, dtype))
    assert model.conjugate.equal(tensor_of(1, torch.complex64).conj())
    # An error names the entry, and is raised before anything is sent.
    refused = [
        ("m.sparse cannot be broadcast: it is sparse", {"m.sparse": torch.eye(2).to_sparse()}),
        ("sparse cannot be broadcast: it is sparse", {"sparse": torch.eye(2).to_sparse_csr()}),
        ("q cannot be broadcast: tensor type torch.quantized.QInt8Tensor",
         {"q": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}),
        ("wide cannot be broadcast: it is an expanded tensor", {"wide": torch.ones(1, 3).expand(4, 3)}),
        ("1._extra_state cannot be broadcast: it is a dict", nn.Sequential(nn.Linear(2, 2), Extra(2, 2)).state_dict()),
        ("bias cannot be broadcast: it is not initialized", nn.LazyLinear(3).state_dict()),
        ("tensor number 1 cannot be broadcast: it is a str", [torch.ones(1), "text"]),
    ]
    for sentence, params in refused:
        with pytest.raises(ValueError, match=sentence):
            hvd.broadcast_parameters(params, 0)
    hvd.barrier()


def test_parameters(run_ranks):
    run_ranks(2, parameters)


def evaluation():
    """SyncBatchNorm without running statistics communicates in training only."""
    hvd.init()
    layer = hvd.SyncBatchNorm(3, track_running_stats=False).eval()
    plain = nn.BatchNorm1d(3, track_running_stats=False).eval()
    if hvd.rank() == 0:         # the other ranks do not take part
        batch = torch.randn(4, 3)
        torch.testing.assert_close(layer(batch), plain(batch))
    hvd.barrier()


def test_batch_norm_in_evaluation(run_ranks):
    run_ranks(2, evaluation, timeout=40)
