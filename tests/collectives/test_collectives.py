"""Every collective x {inproc, shm, tcp} x 1 to 8 ranks x every dtype x counts from 0. Expected values: NumPy."""
import itertools

import numpy as np
import pytest

from bagua_hvd.core import native
from values import OPS, make, reduced
from world import DTYPES, bfloat16_bits, result, storage, view

# 1 MiB of int64 and more: several blocks and segments, sizes that divide nothing; 0: an empty tensor.
COUNTS = [0, 1, 3, 17, 1000, 4099]
LARGE = 150_001

_names = itertools.count()


def name_for_all(world):
    return f"op.{world.n}.{next(_names)}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce(world, dtype):
    n = world.n
    for count, op in itertools.product([*COUNTS, LARGE], OPS):
        if count == LARGE and op != native.OP_SUM:
            continue
        inputs = [make(dtype, count, rank, n) for rank in range(n)]
        expected = reduced(dtype, op, inputs)
        name = name_for_all(world)

        def call(rank, context, inputs=inputs, name=name, op=op):
            out = np.empty_like(inputs[rank])
            before = inputs[rank].copy()
            context.post(native.ALLREDUCE, name, [view(inputs[rank], dtype, out)], op=op, blocking=True).wait()
            assert np.array_equal(before, inputs[rank])
            context.post(native.ALLREDUCE, name, [view(before, dtype, "in place")], op=op).wait()
            return out, before

        for out, in_place in world.run(call):
            np.testing.assert_array_equal(out, expected)
            np.testing.assert_array_equal(in_place, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int32", "int64"])
def test_average_and_factors(world, dtype):
    """prescale, sum, postscale / size; integers truncate towards zero. Powers of two are exact in every float dtype."""
    n, count = world.n, 1003
    values = [np.arange(count) % 16 - 8 * (rank % 2) for rank in range(n)]
    inputs = [bfloat16_bits(v) if dtype == "bfloat16" else v.astype(dtype) for v in values]
    name = name_for_all(world)

    def call(rank, context):
        out = np.empty_like(inputs[rank])
        context.post(native.ALLREDUCE, name, [view(inputs[rank], dtype, out)], op=native.OP_AVERAGE,
                     prescale_factor=2.0, postscale_factor=0.5).wait()
        return out

    total = sum(2 * v for v in values)
    if dtype.startswith("int"):
        expected = np.trunc(total * (0.5 / n)).astype(dtype)
    elif dtype == "float64":
        expected = total * (0.5 / n)
    else:
        scaled = total.astype(np.float32) * np.float32(0.5 / n)
        expected = bfloat16_bits(scaled) if dtype == "bfloat16" else scaled.astype(dtype)
    for out in world.run(call):
        np.testing.assert_array_equal(out, expected)


def test_allreduce_is_bit_equal_on_all_ranks(world):
    """All ranks get the same bits, whatever the order of additions, also where sums round."""
    count = 100_003
    inputs = [np.random.default_rng(rank).standard_normal(count).astype(np.float32) for rank in range(world.n)]
    name = name_for_all(world)

    def call(rank, context):
        out = np.empty_like(inputs[rank])
        context.post(native.ALLREDUCE, name, [view(inputs[rank], "float32", out)], op=native.OP_AVERAGE).wait()
        return out

    outs = world.run(call)
    for out in outs[1:]:
        assert np.array_equal(out.view(np.uint32), outs[0].view(np.uint32))
    np.testing.assert_allclose(outs[0], np.mean(np.array(inputs, np.float64), axis=0), rtol=0, atol=1e-6)


def test_unaligned_tensors(world):
    count = 5001
    name = name_for_all(world)

    def call(rank, context):
        memory = np.zeros(4 * count + 1, np.uint8)
        array = np.frombuffer(memory.data, np.float32, count, offset=1)
        array[:] = np.arange(count) + rank
        context.post(native.ALLREDUCE, name, [view(array, "float32", "in place")]).wait()
        return array

    expected = np.arange(count) * world.n + sum(range(world.n))
    for out in world.run(call):
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_allgather_with_unequal_rows(world, dtype):
    for base in (0, 1, 30, 20_000):
        inputs = [make(dtype, (base + rank) % (base + 2) * 3, rank, 8).reshape(-1, 3) for rank in range(world.n)]
        expected = np.concatenate(inputs)
        name = name_for_all(world)

        def call(rank, context, inputs=inputs, name=name):
            operation = context.post(native.ALLGATHER, name, [view(inputs[rank], dtype)])
            operation.wait()
            return result(operation, 0, dtype, (3,))

        for out in world.run(call):
            np.testing.assert_array_equal(out, expected.view(storage(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast_from_every_root(world, dtype):
    for count in [*COUNTS, LARGE]:
        root = count % world.n
        inputs = [make(dtype, count, rank, 8) for rank in range(world.n)]
        name = name_for_all(world)

        def call(rank, context, inputs=inputs, name=name, root=root):
            out = np.empty_like(inputs[rank])
            context.post(native.BROADCAST, name, [view(inputs[rank], dtype, out)], root_rank=root).wait()
            in_place = inputs[rank].copy()
            context.post(native.BROADCAST, name, [view(in_place, dtype, "in place")], root_rank=root).wait()
            return out, in_place

        for out, in_place in world.run(call):
            np.testing.assert_array_equal(out, inputs[root])
            np.testing.assert_array_equal(in_place, inputs[root])


@pytest.mark.parametrize("dtype", DTYPES)
def test_alltoall_with_splits(world, dtype):
    """Rank r sends (r + i) % 3 * scale rows to rank i; the two rows after those are dropped."""
    n = world.n
    for scale in (0, 1, 7, 9000):
        splits = np.array([[(r + i) % 3 * scale for i in range(n)] for r in range(n)], np.int32)
        inputs = [make(dtype, (splits[r].sum() + 2) * 2, r, 8).reshape(-1, 2) for r in range(n)]
        name = name_for_all(world)

        def call(rank, context, inputs=inputs, splits=splits, name=name):
            operation = context.post(native.ALLTOALL, name, [view(inputs[rank], dtype)], splits=list(splits[rank]))
            operation.wait()
            return result(operation, 0, dtype, (2,)), operation.received_splits(0, n)

        for rank, (out, received) in enumerate(world.run(call)):
            starts = splits.cumsum(axis=1) - splits
            parts = [inputs[r][starts[r, rank]:starts[r, rank] + splits[r, rank]] for r in range(n)]
            np.testing.assert_array_equal(out, np.concatenate(parts).view(storage(dtype)))
            assert received == list(splits[:, rank])


def test_results_larger_than_caches(world):
    """9 MiB, unaligned: shared memory writes such results past the caches."""
    n, name, count = world.n, name_for_all(world), (9 << 20) + 7
    memory = [np.random.default_rng(rank).integers(0, 256, count + 1, np.uint8) for rank in range(n)]
    sent = [array[1:] for array in memory]
    share, tail = divmod(count, n)
    splits = [share] * (n - 1) + [share + tail]

    def call(rank, context):
        out = np.empty(count + 3, np.uint8)[3:]
        context.post(native.BROADCAST, f"{name}.broadcast", [view(sent[rank], "uint8", out)], root_rank=n - 1).wait()
        alltoall = context.post(native.ALLTOALL, f"{name}.alltoall", [view(sent[rank], "uint8")], splits=splits)
        allgather = context.post(native.ALLGATHER, f"{name}.allgather", [view(sent[rank][:share], "uint8")])
        alltoall.wait()
        allgather.wait()
        return out, result(alltoall, 0, "uint8"), result(allgather, 0, "uint8")

    for rank, (broadcast, alltoall, allgather) in enumerate(world.run(call)):
        np.testing.assert_array_equal(broadcast, sent[n - 1])
        mine = slice(rank * share, (rank + 1) * share + (tail if rank == n - 1 else 0))
        np.testing.assert_array_equal(alltoall, np.concatenate([array[mine] for array in sent]))
        np.testing.assert_array_equal(allgather, np.concatenate([array[:share] for array in sent]))


def test_alltoall_without_splits(world):
    n, name = world.n, name_for_all(world)

    def call(rank, context):
        sent = np.arange(5 * n, dtype=np.int64) + 1000 * rank
        operation = context.post(native.ALLTOALL, name, [view(sent, "int64")])
        operation.wait()
        return result(operation, 0, "int64")

    for rank, out in enumerate(world.run(call)):
        np.testing.assert_array_equal(out, np.concatenate([np.arange(5 * rank, 5 * rank + 5) + 1000 * r
                                                           for r in range(n)]))


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "bool"])
def test_reducescatter_with_remainder(world, dtype):
    """The first dim0 % n ranks get one row more; ranks may get none."""
    n = world.n
    for rows in (0, 1, n, 3 * n + 1, 30_011):
        inputs = [make(dtype, rows * 2, rank, n).reshape(rows, 2) for rank in range(n)]
        expected = np.array_split(reduced(dtype, native.OP_SUM, inputs), n)
        name = name_for_all(world)

        def call(rank, context, inputs=inputs, name=name):
            operation = context.post(native.REDUCESCATTER, name, [view(inputs[rank], dtype)], op=native.OP_SUM)
            operation.wait()
            return result(operation, 0, dtype, (2,))

        for rank, out in enumerate(world.run(call)):
            np.testing.assert_array_equal(out, expected[rank])


def test_reducescatter_average_and_factors(world):
    n, name = world.n, name_for_all(world)
    inputs = [np.arange(3 * n + 1, dtype=np.float64) + rank for rank in range(n)]

    def call(rank, context):
        operation = context.post(native.REDUCESCATTER, name, [view(inputs[rank], "float64")], op=native.OP_AVERAGE,
                                 prescale_factor=4.0, postscale_factor=0.5)
        operation.wait()
        return result(operation, 0, "float64")

    expected = np.array_split(sum(4.0 * x for x in inputs) * (0.5 / n), n)
    for rank, out in enumerate(world.run(call)):
        np.testing.assert_array_equal(out, expected[rank])


def test_barrier_holds_until_the_last_arrives(world):
    arrived = []
    name = name_for_all(world)

    def call(rank, context):
        arrived.append(rank)
        context.post(native.BARRIER, name, blocking=True).wait()
        assert len(arrived) == world.n

    world.run(call)


def test_group_of_mixed_dtypes_and_shapes(world):
    n, name = world.n, name_for_all(world)
    members = [("float32", (5, 2)), ("int64", (3,)), ("float32", ()), ("float16", (0, 4)), ("float32", (700,))]

    def call(rank, context):
        arrays = [make(dtype, int(np.prod(shape)), rank, n).reshape(shape) for dtype, shape in members]
        outs = [np.empty_like(a) for a in arrays]
        views = [view(a, d, o) for a, o, (d, _) in zip(arrays, outs, members, strict=True)]
        context.post(native.ALLREDUCE, name, views).wait()
        return outs

    for outs in world.run(call):
        for out, (dtype, shape) in zip(outs, members, strict=True):
            inputs = [make(dtype, int(np.prod(shape)), rank, n).reshape(shape) for rank in range(n)]
            np.testing.assert_array_equal(out, reduced(dtype, native.OP_SUM, inputs))


def test_many_in_scrambled_order(world):
    """Ranks post in different orders; operations match by name, and fusion does not change results."""
    n, count, name = world.n, 60, name_for_all(world)

    def call(rank, context):
        order = np.random.default_rng(rank).permutation(count)
        arrays = [np.full(1 + 37 * i, rank + i, np.float32) for i in range(count)]
        operations = [context.post(native.ALLREDUCE, f"{name}.{i}", [view(arrays[i], "float32", "in place")])
                      for i in order]
        for operation in operations:
            operation.wait()
        return arrays

    for arrays in world.run(call):
        for i, array in enumerate(arrays):
            assert array.shape == (1 + 37 * i,) and np.all(array == i * n + sum(range(n))), i
