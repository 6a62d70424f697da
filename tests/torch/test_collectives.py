"""Values, shapes and identities of the collectives, on real ranks, against definitions written out here."""
import gc
import time
import warnings

import pytest
import torch

import bagua_hvd.torch as hvd
from memory import resident_nbytes

REDUCIBLE = [torch.int32, torch.int64, torch.float16, torch.float32, torch.float64, torch.bfloat16]
MOVABLE = [*REDUCIBLE, torch.uint8, torch.int8, torch.int16, torch.bool]
# Tolerances for rounding in each dtype; sums of a few small integers are exact in all of them.
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.float64: 1e-12}
RANKS = pytest.mark.parametrize("n", [1, 2, 3])


def tensor_of(rank, shape, dtype, seed=0):
    """The tensor of rank `rank`, which any rank can compute. Values from -8 to 8."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randint(-8, 9, shape, generator=generator)
    return (values > 0) if dtype is torch.bool else (values.abs() if dtype is torch.uint8 else values).to(dtype)


def assert_equal(actual, expected, what=""):
    assert actual.dtype == expected.dtype, (what, actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    tolerance = TOLERANCE.get(expected.dtype, 0)
    assert torch.allclose(actual.double(), expected.double(), rtol=tolerance, atol=tolerance), (what, actual, expected)


def reduce(tensors, op, prescale=1.0, postscale=1.0):
    """The definition: x * prescale, op over the ranks, * postscale; integers truncate after every step."""
    dtype = tensors[0].dtype

    def scaled(tensor, factor):
        return tensor if factor == 1.0 else (tensor.double() * factor).to(dtype)

    stack = torch.stack([scaled(tensor, prescale).double() for tensor in tensors])
    if op in (hvd.Average, hvd.Sum):
        total = stack.sum(0).to(dtype)
        return scaled(total, postscale / len(tensors) if op == hvd.Average else postscale)
    result = {hvd.Min: stack.amin(0), hvd.Max: stack.amax(0), hvd.Product: stack.prod(0)}[op]
    return scaled(result.to(dtype), postscale)


def allreduce_values():
    hvd.init()
    rank, n = hvd.rank(), hvd.size()
    for dtype in REDUCIBLE:
        for shape in [(0,), (), (1,), (7,), (17, 3), (4, 1000)]:
            for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
                what = (dtype, shape, op)
                inputs = [tensor_of(r, shape, dtype) for r in range(n)]
                mine = inputs[rank].clone()
                assert_equal(hvd.allreduce(mine, op=op), reduce(inputs, op), what)
                assert torch.equal(mine, inputs[rank]), ("the input was modified", what)
                assert hvd.allreduce_(mine, op=op) is mine
                assert_equal(mine, reduce(inputs, op), what)
        inputs = [tensor_of(r, (50,), dtype, seed=1) for r in range(n)]
        for op in (hvd.Average, hvd.Sum):
            for factors in [(0.5, 1.0), (1.0, 3.0), (2.0, 0.25)]:
                reduced = hvd.allreduce(inputs[rank], op=op, prescale_factor=factors[0], postscale_factor=factors[1])
                assert_equal(reduced, reduce(inputs, op, *factors), (dtype, op, factors))
    # The default is Average: a division by n, with truncation towards zero for integers.
    sums = [3, -3] if n == 2 else [n, -n]
    mine = torch.tensor(sums) if rank == 0 else torch.zeros(2, dtype=torch.int64)
    assert hvd.allreduce(mine).tolist() == [int(value / n) for value in sums]
    assert hvd.allreduce(torch.ones(2), average=False).tolist() == [n, n]


def allreduce_forms():
    hvd.init()
    rank, n = hvd.rank(), hvd.size()
    inputs = [tensor_of(r, (5, 2), torch.float32) for r in range(n)]
    expected = reduce(inputs, hvd.Sum)
    mine = inputs[rank].clone()
    handle = hvd.allreduce_async(mine, op=hvd.Sum)
    assert_equal(hvd.synchronize(handle), expected)
    assert torch.equal(mine, inputs[rank])
    assert hvd.synchronize(hvd.allreduce_async_(mine, op=hvd.Sum)) is mine
    assert_equal(mine, expected)
    assert_equal(hvd.allreduce(inputs[rank], op=hvd.Sum, compression=hvd.Compression.fp16), expected)
    integers = tensor_of(rank, (3,), torch.int64)
    assert hvd.allreduce(integers, op=hvd.Sum, compression=hvd.Compression.fp16).dtype == torch.int64

    # Grouped: mixed shapes and dtypes, one handle, input order.
    shapes = [((3,), torch.float32), ((0, 2), torch.float32), ((2, 2), torch.float64), ((), torch.int32)]
    groups = [[tensor_of(r, shape, dtype, seed=i) for i, (shape, dtype) in enumerate(shapes)] for r in range(n)]
    expected = [reduce(list(members), hvd.Average) for members in zip(*groups, strict=True)]
    for actual in (
        hvd.grouped_allreduce(groups[rank]),
        hvd.grouped_allreduce(groups[rank], name="named"),
        hvd.synchronize(hvd.grouped_allreduce_async(groups[rank])),
        hvd.grouped_allreduce_([tensor.clone() for tensor in groups[rank]]),
        hvd.synchronize(hvd.grouped_allreduce_async_([tensor.clone() for tensor in groups[rank]])),
    ):
        assert len(actual) == len(expected)
        for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_equal(one, other, i)
    mine = [tensor.clone() for tensor in groups[rank]]
    assert all(one is other for one, other in zip(hvd.grouped_allreduce_(mine), mine, strict=True))

    # A leaf that requires a gradient is reduced in place like any other tensor.
    parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
    assert hvd.allreduce_(parameter, op=hvd.Sum) is parameter
    assert parameter.tolist() == [sum(range(n))] * 2
    assert not hvd.allreduce(torch.ones(2)).requires_grad

    # Many small tensors in flight at once, fused or not.
    many = [hvd.allreduce_async(torch.full((i % 7 + 1,), float(i + rank)), op=hvd.Sum, name=f"many.{i}")
            for i in range(200)]
    for i, handle in enumerate(many):
        assert hvd.synchronize(handle).tolist() == [i * n + sum(range(n))] * (i % 7 + 1)

    # Sparse: gathered, uncoalesced.
    sparse = torch.sparse_coo_tensor(torch.tensor([[rank, 4]]), torch.tensor([2.0, 4.0]), (6,), check_invariants=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reduced = hvd.sparse_allreduce_async(sparse, "sparse", hvd.Average)()
    assert reduced._nnz() == 2 * n
    dense = torch.zeros(6)
    for r in range(n):
        dense[r] += 2.0 / n
        dense[4] += 4.0 / n
    assert_equal(reduced.to_dense(), dense)
    if n > 1:
        large = torch.sparse_coo_tensor([[rank]], [1.0], (n + rank,), check_invariants=True)
        with pytest.raises(hvd.HorovodInternalError, match=rf"\({n},\) on rank 0, but \({n + 1},\) on rank 1"):
            hvd.sparse_allreduce_async(large, "sparse", hvd.Sum)()


def gather_and_scatter():
    hvd.init()
    rank, n = hvd.rank(), hvd.size()
    for dtype in MOVABLE:
        for rows in ([1] * n, [r for r in range(n)], [3 + 2 * r for r in range(n)], [0] * n):
            for trailing in [(), (4,), (2, 3), (0,)]:
                inputs = [tensor_of(r, (rows[r], *trailing), dtype) for r in range(n)]
                assert_equal(hvd.allgather(inputs[rank]), torch.cat(inputs), (dtype, rows, trailing))
        for root in range(n):
            inputs = [tensor_of(r, (3, 5), dtype) for r in range(n)]
            mine = inputs[rank].clone()
            assert_equal(hvd.broadcast(mine, root), inputs[root])
            assert torch.equal(mine, inputs[rank])
            assert hvd.broadcast_(mine, root) is mine
            assert_equal(mine, inputs[root])
            assert_equal(hvd.synchronize(hvd.broadcast_async(inputs[rank], root)), inputs[root])
            mine = inputs[rank].clone()
            assert hvd.synchronize(hvd.broadcast_async_(mine, root)) is mine
            assert_equal(mine, inputs[root])
        assert_equal(hvd.broadcast(torch.tensor(rank).to(dtype), n - 1), torch.tensor(n - 1).to(dtype))

        # alltoall without splits: equal parts and one tensor.
        inputs = [tensor_of(r, (2 * n, 3), dtype) for r in range(n)]
        even = torch.cat([tensor[2 * rank:2 * rank + 2] for tensor in inputs])
        output = hvd.alltoall(inputs[rank])
        assert isinstance(output, torch.Tensor)
        assert_equal(output, even)
        output, received = hvd.synchronize(hvd.alltoall_async(inputs[rank]))
        assert_equal(output, even)
        assert_equal(received, torch.full((n,), 2, dtype=torch.int32))
        # With splits: rank r sends r + i rows to rank i, and one row more is dropped.
        rows = [sum(r + i for i in range(n)) + 1 for r in range(n)]
        inputs = [tensor_of(r, (rows[r], 2), dtype) for r in range(n)]
        starts = [[sum(r + j for j in range(i)) for i in range(n)] for r in range(n)]
        expected = torch.cat([inputs[r][starts[r][rank]:starts[r][rank] + r + rank] for r in range(n)])
        splits = [rank + i for i in range(n)]
        for form in (splits, torch.tensor(splits, dtype=torch.int32)):
            output, received = hvd.alltoall(inputs[rank], splits=form)
            assert_equal(output, expected)
            assert_equal(received, torch.tensor([r + rank for r in range(n)], dtype=torch.int32))
    output, received = hvd.alltoall(torch.empty(0), splits=[0] * n)
    assert output.shape == (0,) and received.tolist() == [0] * n

    inputs = [[tensor_of(r, (r + 1, 2), torch.float32, seed) for seed in range(3)] for r in range(n)]
    expected = [torch.cat(members) for members in zip(*inputs, strict=True)]
    for gathered in (hvd.grouped_allgather(inputs[rank]),
                     hvd.synchronize(hvd.grouped_allgather_async(inputs[rank], name="group"))):
        for one, other in zip(gathered, expected, strict=True):
            assert_equal(one, other)

    for dtype in REDUCIBLE:
        for rows in (0, 1, n, 2 * n + 1, 10):
            inputs = [tensor_of(r, (rows, 3), dtype) for r in range(n)]
            size, longer = divmod(rows, n)
            start = rank * size + min(rank, longer)
            end = start + size + (rank < longer)
            for op in (hvd.Average, hvd.Sum):
                expected = reduce(inputs, op, 2.0, 0.5)[start:end]
                scattered = hvd.reducescatter(inputs[rank], op=op, prescale_factor=2.0, postscale_factor=0.5)
                assert_equal(scattered, expected, (dtype, rows, op))
    inputs = [[tensor_of(r, (n * i,), torch.float32, i) for i in (1, 2)] for r in range(n)]
    expected = [reduce(list(members), hvd.Average).chunk(n)[rank] for members in zip(*inputs, strict=True)]
    for scattered in (hvd.grouped_reducescatter(inputs[rank]),
                      hvd.synchronize(hvd.grouped_reducescatter_async(inputs[rank]))):
        for one, other in zip(scattered, expected, strict=True):
            assert_equal(one, other)


def results_keep_their_memory():
    """Results are views of the core's memory, which is freed after the last tensor that uses it."""
    hvd.init()
    n = hvd.size()
    row = torch.arange(1 << 16, dtype=torch.float32)
    kept = hvd.allgather(row[None])
    part = hvd.allgather(row[None])[n - 1, 5:9]         # a view of a deleted result
    sent = hvd.synchronize(hvd.allgather_async(row.clone()[None]))     # a deleted source
    gc.collect()
    for _ in range(50):
        hvd.allgather(torch.rand(1, 1 << 16))
    assert torch.equal(kept, row.expand(n, -1))
    assert torch.equal(sent, row.expand(n, -1))
    assert part.tolist() == [5, 6, 7, 8]
    kept += 1                                           # writable
    assert kept[0, 0] == 1
    before = resident_nbytes()
    for _ in range(400):
        hvd.allgather(torch.rand(1, 1 << 16))           # 256 KiB per rank: a leak would be 100 MiB or more
    assert resident_nbytes() - before < 50 << 20


def names_and_handles():
    hvd.init()
    rank, n = hvd.rank(), hvd.size()
    # Operations match by name: every rank posts in its own order.
    order = list(range(20))
    order = order[rank:] + order[:rank] if rank % 2 == 0 else order[::-1]
    handles = {i: hvd.allreduce_async(torch.tensor([float(i)]), op=hvd.Sum, name=str(i)) for i in order}
    for i, handle in handles.items():
        assert hvd.synchronize(handle).tolist() == [i * n]
    # A name may be in flight once per kind.
    one = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="same")
    other = hvd.allgather_async(torch.ones(1), name="same")
    third = hvd.broadcast_async(torch.ones(1), 0, name="same")
    assert hvd.synchronize(other).shape == (n,)
    assert hvd.synchronize(one).tolist() == [n]
    assert hvd.synchronize(third).tolist() == [1]
    # A handle is unknown after synchronize().
    with pytest.raises(ValueError, match="Handle .* was not created or has been cleared"):
        hvd.poll(one)
    assert hvd.synchronize(one) is None
    assert hvd.synchronize(10**9) is None
    # Nothing is reduced before the last rank posts, which it does after the other ranks have polled.
    handle = None
    if rank != n - 1:
        handle = hvd.allreduce_async(torch.ones(4), name="late")
        assert not hvd.poll(handle)
    hvd.barrier()
    if handle is None:
        handle = hvd.allreduce_async(torch.ones(4), name="late")
    deadline = time.monotonic() + 20
    while not hvd.poll(handle) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert hvd.poll(handle)
    assert hvd.synchronize(handle).tolist() == [1] * 4
    hvd.shutdown()
    # Handles are numbered from the start again, over all kinds.
    hvd.init()
    hvd.barrier()
    assert hvd.allreduce_async(torch.ones(1)) == 2
    hvd.allgather(torch.ones(1))
    last = hvd.broadcast_async(torch.ones(1), 0)
    assert last == 4
    hvd.synchronize(2)
    hvd.synchronize(last)


def from_threads():
    """Several threads post and wait at once, under different names."""
    from concurrent.futures import ThreadPoolExecutor

    hvd.init()
    n = hvd.size()

    def work(thread):
        for i in range(100):
            value = float(thread * 100 + i)
            result = hvd.allreduce(torch.full((3,), value), op=hvd.Sum, name=f"{thread}.{i}")
            assert result.tolist() == [value * n] * 3, (thread, i, result)
            assert hvd.allgather(torch.full((1,), value), name=f"{thread}.{i}").tolist() == [value] * n
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


@RANKS
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_allreduce_values(run_ranks, n, transport):
    run_ranks(n, allreduce_values, env={"BAGUA_HVD_TRANSPORT": transport})


@RANKS
def test_allreduce_forms(run_ranks, n):
    run_ranks(n, allreduce_forms)


@RANKS
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_gather_and_scatter(run_ranks, n, transport):
    run_ranks(n, gather_and_scatter, env={"BAGUA_HVD_TRANSPORT": transport})


@pytest.mark.parametrize("n", [1, 2])
def test_results_keep_their_memory(run_ranks, n):
    run_ranks(n, results_keep_their_memory)


@pytest.mark.parametrize("n", [2, 3])
def test_names_and_handles(run_ranks, n):
    run_ranks(n, names_and_handles)


def test_from_threads(run_ranks):
    run_ranks(2, from_threads)
