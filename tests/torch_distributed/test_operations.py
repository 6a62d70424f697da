"""Every c10d operation on the "bagua" backend, compared with torch's arithmetic on all ranks' tensors."""
import functools
import gc
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from torch_group import start

DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
          torch.float64, torch.bool, torch.complex64]
BINARY = {"SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
          "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
SHAPES = [(), (0,), (3, 5)]


def values(rank, shape, dtype):
    generator = torch.Generator().manual_seed(17 * rank + len(shape))
    return torch.randint(0, 3, shape, generator=generator).to(dtype)


def everybodys(size, shape, dtype):
    return [values(rank, shape, dtype) for rank in range(size)]


def possible(op, dtype):
    if dtype.is_complex:
        return op == "SUM"
    return op not in ("BAND", "BOR", "BXOR") or not dtype.is_floating_point


def reductions(file):
    rank, size = start(file)
    for dtype in DTYPES:
        for shape in SHAPES:
            for op in [op for op in BINARY if possible(op, dtype)]:
                expected = functools.reduce(BINARY[op], everybodys(size, shape, dtype))
                tensor = values(rank, shape, dtype)
                dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
                assert torch.equal(tensor, expected), (op, dtype, shape, tensor, expected)
                if dtype not in (torch.float32, torch.bfloat16, torch.uint8):
                    continue
                tensor = values(rank, shape, dtype)
                dist.reduce(tensor, 1, getattr(dist.ReduceOp, op))
                assert torch.equal(tensor, expected if rank == 1 else values(rank, shape, dtype)), (op, dtype, shape)
                if shape and shape[0]:
                    reduce_scattered(rank, size, op, dtype, shape)
    for dtype in (torch.float32, torch.float64, torch.int64):
        tensor = torch.full((5,), 2 * rank, dtype=dtype)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert (tensor == 2 * (size - 1) / 2).all()
    for dtype in (torch.int8, torch.int16, torch.int32):
        tensor = torch.tensor([-rank - (rank == 2), 7, 100 + rank], dtype=dtype)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert tensor.tolist() == [-1, 7, 101], dtype   # of -4, 21 and 303
    tensor = torch.tensor([200, rank], dtype=torch.uint8)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert tensor.tolist() == [200, sum(range(size)) // size]
    with pytest.raises(ValueError, match=r"SUM.* is not supported for torch.float8_e4m3fn"):
        dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))
    tensors = [torch.full((3,), float(rank)), torch.full((2, 2), float(rank))]
    dist.all_reduce_coalesced(tensors)
    assert all((tensor == sum(range(size))).all() for tensor in tensors)
    strided = torch.full((4, 6), float(rank))[:, ::2]
    dist.all_reduce(strided)
    assert (strided == sum(range(size))).all()
    dist.destroy_process_group()


def reduce_scattered(rank, size, op, dtype, shape):
    of_ranks = [[values(rank + 10 * part, shape, dtype) for part in range(size)] for rank in range(size)]
    expected = functools.reduce(BINARY[op], [parts[rank] for parts in of_ranks])
    output = torch.empty(shape, dtype=dtype)
    dist.reduce_scatter(output, of_ranks[rank], getattr(dist.ReduceOp, op))
    assert torch.equal(output, expected), (op, dtype, shape)
    output = torch.empty(shape, dtype=dtype)
    dist.reduce_scatter_single(output, torch.cat(of_ranks[rank]), getattr(dist.ReduceOp, op))
    assert torch.equal(output, expected), (op, dtype, shape)


def overlapping(file):
    """A result may lie anywhere within its input, and an input anywhere within its result."""
    rank, size = start(file)
    numbers = torch.arange(2000 * size) % 1000.0
    expected = numbers * sum(range(1, size + 1))
    for begin in (2000 * rank, 0, 1000):
        source = numbers * (rank + 1)
        output = source[begin:begin + 2000]
        dist.reduce_scatter_single(output, source)
        assert torch.equal(output, expected[2000 * rank:2000 * (rank + 1)])
    whole = torch.zeros(2000 * size + 10)
    mine = whole[2000 * rank + 10:2000 * (rank + 1) + 10].fill_(rank)
    output = whole[:-10]
    dist.all_gather_single(output, mine)
    assert torch.equal(output, torch.arange(float(size)).repeat_interleave(2000))
    dist.destroy_process_group()


def movements(file):
    rank, size = start(file)
    for dtype in [*DTYPES, torch.uint16, torch.float8_e4m3fn]:
        for shape in SHAPES:
            everyone = [t.view(torch.uint8) if dtype is torch.float8_e4m3fn else t for t in
                        everybodys(size, shape, torch.uint8 if dtype is torch.float8_e4m3fn else dtype)]
            everyone = [t.view(dtype) for t in everyone]
            moved(rank, size, dtype, shape, everyone)
    parts = [torch.full((rank + 1, part + 1), float(10 * rank + part)) for part in range(size)]
    outputs = [torch.empty(part + 1, rank + 1) for part in range(size)]
    dist.all_to_all(outputs, parts)
    assert all((output == 10 * part + rank).all() for part, output in enumerate(outputs))
    uneven = [torch.empty(part + 1) for part in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    assert all((output == part).all() for part, output in enumerate(uneven))
    strided = torch.full((3, 4), float(rank)).t()
    dist.broadcast(strided, 1)
    assert (strided == 1).all()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": other} for other in range(size)]
    dist.destroy_process_group()


def unequal(file):
    """Received data only goes into an output of its size, and some ranks may omit splits."""
    rank, size = start(file)
    memory = torch.zeros(8)
    parts = [torch.full((4,), part + 1.0) for part in range(size)] if rank == 0 else None
    refused = pytest.raises(ValueError, match="rank 0 sent 4 elements, but its output holds 2")
    with nullcontext() if rank else refused:
        dist.scatter(memory[:2] if rank == 0 else memory[:4], parts, 0)
    assert memory.tolist() == [2.0 * rank] * (4 * rank) + [0] * (8 - 4 * rank)
    outputs = [torch.zeros(2) for _ in range(size)] if rank == 1 else None
    with pytest.raises(ValueError, match="rank 0 sent 1 elements, but its output holds 2") if rank else nullcontext():
        dist.gather(torch.zeros(1 + 2 * rank), outputs, 1)
    with pytest.raises(ValueError, match="rank [01] sent [12] elements, but its output holds [12]"):
        dist.all_to_all_single(torch.empty(2 + 2 * rank), torch.zeros(2 + 2 * rank))
    with pytest.raises(ValueError, match="different dtypes: torch.float32, torch.int32"):
        dist.group.WORLD.alltoall([torch.empty(2)] * 2, [torch.empty(2, dtype=torch.int32)] * 2)
    sent, received = torch.arange(4.0) + 10 * rank, torch.zeros(4, 2)[:, 0]
    dist.all_to_all_single(received, sent, *[[2, 2]] * (2 * rank))
    assert received.tolist() == [2 * rank, 2 * rank + 1, 2 * rank + 10, 2 * rank + 11]
    received = torch.zeros(3 + 2 * rank)
    dist.all_to_all_single(received, sent, [1 + 2 * rank, 2], None if rank else [1, 3])
    assert received.tolist() == ([1, 2, 3, 12, 13] if rank else [0, 10, 11])
    dist.destroy_process_group()


def same(a, b):
    a_bytes, b_bytes = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a_bytes, b_bytes)


def moved(rank, size, dtype, shape, everyone):
    mine = everyone[rank]
    for root in range(size):
        tensor = mine.clone()
        dist.broadcast(tensor, root)
        assert same(tensor, everyone[root])
        gathered = [torch.empty_like(mine) for _ in range(size)] if rank == root else None
        dist.gather(mine, gathered, root)
        assert gathered is None or all(map(same, gathered, everyone))
        output = torch.empty_like(mine)
        dist.scatter(output, everyone if rank == root else None, root)
        assert same(output, mine), (dtype, shape, output, mine)
    gathered = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(gathered, mine)
    assert all(map(same, gathered, everyone))
    whole = torch.empty((size, *shape), dtype=dtype)
    dist.all_gather_single(whole, mine)
    assert all(map(same, whole.unbind(0), everyone))
    output, rows = torch.empty((size, *shape), dtype=dtype), torch.stack([mine] * size)
    dist.all_to_all_single(output, rows)
    assert all(map(same, output.unbind(0), everyone))
    if shape and not dtype.is_complex:
        counts = [other + 1 for other in range(size)]        # rows for each rank
        sent = torch.cat([mine[:1]] * sum(counts)) if shape[0] else mine
        if shape[0]:
            output = torch.empty(((rank + 1) * size, *shape[1:]), dtype=dtype)
            dist.all_to_all_single(output, sent, [rank + 1] * size, counts)
            expected = [everyone[other][:1] for other in range(size) for _ in range(rank + 1)]
            assert all(map(same, output.split(1), expected))


def messages(file):
    rank, size = start(file)
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in (0, 1, 1000, 100_000):         # in a message of its own, and in the requested memory
        received = torch.empty(count)
        requests = [dist.irecv(received, left), dist.isend(torch.full((count,), float(rank)), right)]
        assert all(request.wait() for request in requests)
        assert (received == left).all() and requests[0]._source_rank() == left
    # One element is contiguous with any stride.
    columns = torch.arange(10.0).view(1, 2, 5)[:, :1, 3:]
    received = torch.zeros(1, 4)[:, 2]
    requests = [dist.irecv(received, left), dist.isend(columns[..., 0] + rank, right)]
    assert all(request.wait() for request in requests) and received.tolist() == [3.0 + left]
    requests = [dist.irecv(received, left), dist.isend(torch.arange(5.0).view(1, 5)[:, 2], right)]
    assert all(request.wait() for request in requests) and received.tolist() == [2.0]
    # A message that cannot be sent takes no number.
    with pytest.raises(ValueError, match="layout"):
        dist.isend(torch.eye(2).to_sparse(), right)
    # Messages with one tag arrive in order; those with different tags can be received in any order.
    for number in range(3):
        dist.isend(torch.tensor([number, 5]), right, tag=5)
    sent = dist.isend(torch.tensor([9, 6]), right, tag=6)
    got = torch.empty(2, dtype=torch.int64)
    dist.recv(got, left, tag=6)
    assert got.tolist() == [9, 6]
    for number in range(3):
        dist.recv(got, left, tag=5)
        assert got.tolist() == [number, 5]
    sent.wait()
    dist.barrier()
    anybody(rank, size)
    wrong = [dist.isend(torch.zeros(3), right), dist.irecv(torch.zeros(2), left)]
    wrong[0].wait()
    with pytest.raises(ValueError, match=f"recv of 8 bytes, but rank {left} sent 12"):
        wrong[1].wait()
    for sender, receiver in ((100_000, 50_000), (5, 50_000), (100_000, 5)):
        wrong = [dist.isend(torch.zeros(sender), right, tag=8), dist.irecv(torch.zeros(receiver), tag=8)]
        with pytest.raises(ValueError, match=f"send of {4 * sender} bytes, but rank {right} receives another size"):
            wrong[0].wait()
        with pytest.raises(ValueError, match=f"recv of {4 * receiver} bytes, but rank {left} sent another size"):
            wrong[1].wait()
        dist.barrier()
    with pytest.raises(ValueError, match=f"rank {rank} of {size} cannot send to rank {rank}"):
        dist.group.WORLD.send([torch.zeros(1)], rank, 0)
    dist.barrier()
    dist.destroy_process_group()


def new_tags(file):
    """A tag that is not used again leaves no object behind on either side."""
    rank, size = start(file)

    def exchange(tags, anyone):
        for tag in tags:
            if rank:
                dist.send(torch.ones(2), 0, tag=tag)
            else:
                dist.recv(torch.empty(2), None if anyone else 1, tag=tag)

    for anyone in (False, True):
        exchange(range(5), anyone)
        gc.collect()
        before = len(gc.get_objects())
        exchange(range(1000, 1300), anyone)
        gc.collect()
        assert len(gc.get_objects()) - before < 100, anyone
    dist.barrier()
    dist.destroy_process_group()


def anybody(rank, size):
    """Rank 0 receives two messages from each rank, alternately from any source and from a given one."""
    if rank:
        for number in range(3):
            dist.send(torch.tensor([rank, number]), 0, tag=1)
        for number in range(2 * (rank == 1)):
            dist.send(torch.tensor([rank, number]), 0, tag=2)
        return
    heard, got = [], torch.empty(2, dtype=torch.int64)
    several = [(tensor := torch.empty(2, dtype=torch.int64), dist.irecv(tensor, tag=1)) for _ in range(size - 1)]
    for tensor, request in several:
        request.wait()
        assert tensor[0] == request._source_rank()
        heard.append(tuple(tensor.tolist()))
    dist.recv(got, 1, tag=1)
    heard.append(tuple(got.tolist()))
    while len(heard) < 3 * (size - 1):
        source = dist.recv(got, tag=1)
        assert source == got[0]
        heard.append(tuple(got.tolist()))
    assert sorted(heard) == [(other, number) for other in range(1, size) for number in range(3)]
    assert all(heard.index((other, 0)) < heard.index((other, 1)) < heard.index((other, 2)) for other in range(1, size))
    pairs = [torch.empty(2, dtype=torch.int64) for _ in range(2)]
    for request in [dist.irecv(pairs[0], tag=2), dist.irecv(pairs[1], 1, tag=2)]:
        request.wait()
    assert [pair.tolist() for pair in pairs] == [[1, 0], [1, 1]]


def sparse(file):
    rank, size = start(file)
    for hybrid in (0, 1):
        shape = (6, 3)[:2]
        mine = torch.zeros(shape)
        mine[rank], mine[5] = rank + 1, 1
        tensor = mine.to_sparse(1 if hybrid else 2)
        dist.all_reduce(tensor)
        expected = torch.zeros(shape)
        expected[5] = size
        for other in range(size):
            expected[other] += other + 1
        assert tensor.is_coalesced() and torch.equal(tensor.to_dense(), expected)
    with pytest.raises(ValueError, match="sparse tensors are reduced by SUM and AVG only"):
        dist.all_reduce(torch.zeros(2, 2).to_sparse(), dist.ReduceOp.MAX)
    with pytest.raises(RuntimeError, match=r"sparse tensors: \(2, 3\) on rank 0, but \(3, 3\) on rank 1"):
        dist.all_reduce(torch.ones(2 + rank, 3).to_sparse())
    dist.destroy_process_group()


@pytest.mark.parametrize("function", [reductions, movements, messages, sparse])
def test_three_ranks(run_group, function):
    run_group(3, function)


@pytest.mark.parametrize("function", [messages, movements, unequal, overlapping, new_tags])
def test_two_ranks(run_group, function):
    run_group(2, function)
