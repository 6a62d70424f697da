"""Collectives over several hosts, simulated by host ids: real shared memory within each, real sockets between them."""
import itertools
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest

from bagua_hvd.core import native
from bagua_hvd.core.exceptions import HorovodInternalError
from memory import resident_nbytes
from values import make, reduced
from world import DTYPES, World, bfloat16_bits, result, view

# The host of each rank: one host, one rank per host, equal and unequal hosts, ranks by host and round-robin.
HOSTS = ["A", "AAA", "AB", "ABC", "AAB", "AABB", "ABAB", "AABBB", "ABBBB", "ABCDE", "AABBCC", "ABCABCA", "ABCDEFG",
         "AAAABBBB", "ABCDEFGH"]
PATHS = ["", "ring", "doubling", "halving"]
# The flat paths ignore hosts, so for many ranks one rank per host is enough.
WORLDS = [(hosts, path) for hosts in HOSTS for path in PATHS
          if len(hosts) < 6 or not path or len(set(hosts)) == len(hosts)]
# The forced paths that `make test` covers.
FORCED = {("ABCDE", "ring"), ("ABC", "doubling"), ("AABB", "halving")}
assert set(WORLDS) > FORCED and {path for _, path in FORCED} == set(PATHS) - {""}
# Empty, fewer elements than shards, sizes that divide nothing, and several segments.
COUNTS = [0, 1, 3, 1000, 65_537]
LARGE = 1_000_003
DTYPES_PER_WORLD = 3

_names = itertools.count()
_boot = os.urandom(4).hex()


def name_for_all():
    return f"hosts.{next(_names)}"


def on_hosts(hosts, path="", **options):
    """A World whose ranks are on these hosts, one letter per rank."""
    return World(len(hosts), "auto", path, hosts=[f"{_boot}.{host}" for host in hosts], **options)


@pytest.fixture(scope="module", ids=lambda p: f"{p[0]}-{p[1] or 'chosen'}", params=[
    pytest.param(place, marks=[pytest.mark.long] if place[1] and place not in FORCED else []) for place in WORLDS])
def world(request):
    with on_hosts(*request.param) as w:
        w.place = request.param
        yield w


def check_allreduce(world, dtype, count, op, offset=0):
    """In place and out of place, in memory that begins `offset` bytes past an aligned address."""
    inputs = [make(dtype, count, rank, world.n) for rank in range(world.n)]
    expected = reduced(dtype, op, inputs)
    name = name_for_all()

    def call(rank, context):
        memory = np.zeros(inputs[rank].nbytes + offset, np.uint8)
        array = np.frombuffer(memory.data, inputs[rank].dtype, count, offset) if count else inputs[rank].copy()
        array[:] = inputs[rank]
        out = np.empty_like(array)
        context.post(native.ALLREDUCE, name, [view(array, dtype, out)], op=op, blocking=True).wait()
        np.testing.assert_array_equal(array, inputs[rank])
        context.post(native.ALLREDUCE, name, [view(array, dtype, "in place")], op=op).wait()
        return out, array

    for out, in_place in world.run(call):
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(in_place, expected)


def dtypes_of(world):
    """The next DTYPES_PER_WORLD dtypes for each world, so that every path covers all dtypes."""
    begin = WORLDS.index(world.place) * DTYPES_PER_WORLD
    return [list(DTYPES)[index % len(DTYPES)] for index in range(begin, begin + DTYPES_PER_WORLD)]


def test_every_path_sums_every_dtype():
    for path in PATHS:
        worlds = [SimpleNamespace(place=place) for place in WORLDS if place[1] == path]
        assert {dtype for world in worlds for dtype in dtypes_of(world)} == set(DTYPES)


@pytest.mark.parametrize("share", range(DTYPES_PER_WORLD))
def test_sums(world, share):
    for count in COUNTS:
        check_allreduce(world, dtypes_of(world)[share], count, native.OP_SUM)


@pytest.mark.parametrize("dtype, op", [("float32", native.OP_MIN), ("int32", native.OP_MAX),
                                       ("float32", native.OP_PRODUCT)])
def test_other_reductions(world, dtype, op):
    for count in COUNTS:
        check_allreduce(world, dtype, count, op)


def test_large_and_unaligned(world):
    check_allreduce(world, "float32", LARGE, native.OP_SUM, offset=4)
    check_allreduce(world, "float64", 65_537, native.OP_SUM, offset=1)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int32", "int64"])
def test_average_with_factors(world, dtype):
    """Powers of two, so exact in every float dtype wherever the scaling is done; integers truncate towards zero."""
    values = [np.arange(1003) % 16 - 8 * (rank % 2) for rank in range(world.n)]
    inputs = [bfloat16_bits(v) if dtype == "bfloat16" else v.astype(dtype) for v in values]
    name = name_for_all()

    def call(rank, context):
        out = np.empty_like(inputs[rank])
        context.post(native.ALLREDUCE, name, [view(inputs[rank], dtype, out)], op=native.OP_AVERAGE,
                     prescale_factor=2.0, postscale_factor=0.5).wait()
        return out

    total = sum(2 * v for v in values)
    factor = 0.5 / world.n
    if dtype.startswith("int"):
        expected = np.trunc(total * factor).astype(dtype)
    elif dtype == "float64":
        expected = total * factor
    else:
        scaled = total.astype(np.float32) * np.float32(factor)
        expected = bfloat16_bits(scaled) if dtype == "bfloat16" else scaled.astype(dtype)
    for out in world.run(call):
        np.testing.assert_array_equal(out, expected)


def test_all_ranks_end_bit_equal(world):
    """All ranks get the same bits, also where sums round, whatever the order of additions."""
    inputs = [np.random.default_rng(rank).standard_normal(100_003).astype(np.float32) for rank in range(world.n)]
    name = name_for_all()

    def call(rank, context):
        out = np.empty_like(inputs[rank])
        context.post(native.ALLREDUCE, name, [view(inputs[rank], "float32", out)], op=native.OP_AVERAGE).wait()
        return out

    outs = world.run(call)
    for out in outs[1:]:
        assert np.array_equal(out.view(np.uint32), outs[0].view(np.uint32))
    np.testing.assert_allclose(outs[0], np.mean(np.array(inputs, np.float64), axis=0), rtol=0, atol=1e-6)


def test_a_group_of_many_sizes(world):
    """Fused into one vector, in which pieces, segments and shards end within tensors."""
    counts = [0, 1, 7, 300_001, 0, 65_537, 2, 4099]
    name = name_for_all()

    def call(rank, context):
        inputs = [make("float32", count, rank, world.n) for count in counts]
        outs = [np.empty_like(x) for x in inputs]
        context.post(native.ALLREDUCE, name, [view(x, "float32", out) for x, out in zip(inputs, outs, strict=True)],
                     op=native.OP_SUM).wait()
        return outs

    for outs in world.run(call):
        for count, out in zip(counts, outs, strict=True):
            expected = reduced("float32", native.OP_SUM, [make("float32", count, rank, world.n)
                                                          for rank in range(world.n)])
            np.testing.assert_array_equal(out, expected)


def rows_of(rank):
    """The number of rows of dim 0 on a rank; some ranks have none."""
    return [0, 3, 70_000, 1, 5, 12_345, 0, 2][rank]


@pytest.mark.parametrize("dtype", ["float32", "uint8", "float64"])
def test_allgather_with_unequal_rows(world, dtype):
    inputs = [make(dtype, 3 * rows_of(rank), rank, world.n).reshape(-1, 3) for rank in range(world.n)]
    name = name_for_all()

    def call(rank, context):
        operation = context.post(native.ALLGATHER, name, [view(inputs[rank], dtype)])
        operation.wait()
        return result(operation, 0, dtype, (3,))

    for out in world.run(call):
        np.testing.assert_array_equal(out, np.concatenate(inputs))


@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_broadcast_from_every_root(world, dtype):
    for root, count in [*itertools.product(range(world.n), [0, 1, 65_537]), (world.n // 2, LARGE)]:
        inputs = [make(dtype, count, rank + 1, 3) for rank in range(world.n)]
        name = name_for_all()

        def call(rank, context, inputs=inputs, name=name, root=root):
            out = np.empty_like(inputs[rank])
            context.post(native.BROADCAST, name, [view(inputs[rank], dtype, out)], root_rank=root).wait()
            given = inputs[rank].copy()
            context.post(native.BROADCAST, name, [view(given, dtype, "in place")], root_rank=root).wait()
            return out, given

        for out, in_place in world.run(call):
            np.testing.assert_array_equal(out, inputs[root])
            np.testing.assert_array_equal(in_place, inputs[root])


@pytest.mark.parametrize("dtype", ["float32", "int32", "float16"])
def test_reducescatter(world, dtype):
    for rows in (0, 1, world.n + 1, 20_011):
        inputs = [make(dtype, 2 * rows, rank, world.n).reshape(-1, 2) for rank in range(world.n)]
        total = reduced(dtype, native.OP_SUM, inputs)
        name = name_for_all()

        def call(rank, context, inputs=inputs, name=name):
            operation = context.post(native.REDUCESCATTER, name, [view(inputs[rank], dtype)], op=native.OP_SUM)
            operation.wait()
            return result(operation, 0, dtype, (2,))

        outs = world.run(call)
        np.testing.assert_array_equal(np.concatenate(outs), total)
        assert [len(out) for out in outs] == [len(part) for part in np.array_split(total, world.n)]


def test_reducescatter_averages_and_scales(world):
    inputs = [np.arange(4 * world.n, dtype=np.float32) + rank for rank in range(world.n)]
    name = name_for_all()

    def call(rank, context):
        operation = context.post(native.REDUCESCATTER, name, [view(inputs[rank], "float32")], op=native.OP_AVERAGE,
                                 prescale_factor=2.0, postscale_factor=4.0)
        operation.wait()
        return result(operation, 0, "float32")

    total = np.sum([2 * x for x in inputs], axis=0, dtype=np.float32) * np.float32(4 / world.n)
    np.testing.assert_array_equal(np.concatenate(world.run(call)), total)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_alltoall_with_splits(world, dtype):
    n = world.n
    splits = [[(from_ * 3 + to * 1000) % 4001 for to in range(n)] for from_ in range(n)]
    inputs = [make(dtype, sum(splits[rank]), rank, n) for rank in range(n)]
    name = name_for_all()

    def call(rank, context):
        operation = context.post(native.ALLTOALL, name, [view(inputs[rank], dtype)], splits=splits[rank])
        operation.wait()
        return result(operation, 0, dtype)

    parts = [np.split(x, np.cumsum(row)[:-1]) for x, row in zip(inputs, splits, strict=True)]
    for rank, out in enumerate(world.run(call)):
        np.testing.assert_array_equal(out, np.concatenate([parts[from_][rank] for from_ in range(n)]))


def test_process_sets_across_hosts(world):
    """Sets of ranks have their own hosts and shared memory, which later sets reuse after a removal."""
    sets = [[0, world.n - 1], list(range(1, world.n)), list(range(world.n - 1))] if world.n > 2 else [[0]][:world.n - 1]
    for ranks in sets:
        name = name_for_all()

        def call(rank, context, ranks=ranks, name=name):
            added = context.post(native.PROCESS_SET_ADD, f"{name}.add", splits=ranks)
            added.wait()
            out = np.full(70_001, rank, np.int32)
            for _ in range(3 if rank in ranks else 0):
                context.post(native.ALLREDUCE, name, [view(out, "int32", "in place")], process_set=added.value,
                             op=native.OP_MAX).wait()
            context.post(native.PROCESS_SET_REMOVE, f"{name}.remove", root_rank=added.value).wait()
            return out

        for rank, out in enumerate(world.run(call)):
            np.testing.assert_array_equal(out, max(ranks) if rank in ranks else rank)


def bytes_sent(world):
    return [counters.payload_bytes_sent for counters in world.run(lambda rank, context: context.counters())]


@pytest.mark.parametrize(("hosts", "path", "expected"), [
    # N = 6 * 2^16 bytes. Hierarchical: half of the vector in shared memory twice, then the rank's shard.
    ("AABB", "", 4 * [1.5]), ("AABB", "ring", 4 * [1.5]), ("AABB", "doubling", 4 * [2.0]),
    ("ABCD", "halving", 4 * [1.5]), ("ABC", "doubling", [1.0, 2.0, 1.0]),
    # A single shard: host B's other rank sends all but the owner's part to the owner, which alone uses the network.
    ("ABB", "", [1.0, 2.0, 1.0]),
])
def test_the_path_is_taken(hosts, path, expected):
    """Recognized by the bytes that each rank sends, in units of the vector."""
    count = 6 << 14
    with on_hosts(hosts, path) as world:
        before = bytes_sent(world)
        check_allreduce(world, "float32", count, native.OP_SUM)
        sent = [after - b for after, b in zip(bytes_sent(world), before, strict=True)]
    assert [x / (2 * 4 * count) for x in sent] == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("hosts", ["AB", "AAB"])
def test_an_execution_goes_on_while_nobody_waits_for_it(hosts):
    """Tensors of two dtypes run to completion, in the progress thread, which must not sleep while steps are ready."""
    with on_hosts(hosts) as world:
        def call(rank, context):
            arrays = [np.ones(1 << 21, np.float32), np.ones(1 << 20, np.float64)]
            tensors = [view(array, array.dtype.name, "in place") for array in arrays]
            operation = context.post(native.ALLREDUCE, "goes on", tensors, op=native.OP_SUM)
            until = time.monotonic() + 10       # takes 50 ms, or 20 s with sleeps
            while not operation.done() and time.monotonic() < until:
                time.sleep(0.001)
            done = operation.done()
            operation.wait()
            return done and all((array == world.n).all() for array in arrays)

        assert all(world.run(call))


@pytest.mark.parametrize("streams", [2, 3, 8])
@pytest.mark.parametrize("hosts", ["AB", "AABBB", "ABC"])
def test_several_streams(hosts, streams):
    with on_hosts(hosts, "ring", streams=streams) as world:
        for count in (1, 65_537, LARGE):
            check_allreduce(world, "float32", count, native.OP_SUM)


def test_paths_that_differ_are_an_error():
    with pytest.raises(HorovodInternalError, match='BAGUA_HVD_ALLREDUCE is "ring" on rank 0 but "doubling" on rank 1'):
        World(2, "tcp", ["ring", "doubling"])


def test_an_unknown_path_is_an_error():
    with pytest.raises(ValueError, match='unknown allreduce path "star"; known are ring, doubling, halving$'):
        World(1, "inproc", "star")


@pytest.mark.long
def test_memory_does_not_grow():
    """20,000 small operations of every kind, after as many that fill caches and buffers."""
    kinds = [native.ALLREDUCE, native.ALLGATHER, native.BROADCAST, native.REDUCESCATTER, native.ALLTOALL]
    with on_hosts("AAB") as world:
        def call(rank, context):
            array, out = np.ones(300, np.float32), np.empty(300, np.float32)
            for number in range(20_000 // len(kinds) // 10):
                for kind in kinds:
                    given = out if kind in (native.ALLREDUCE, native.BROADCAST) else None
                    tensors = [view(array, "float32", given)]
                    for _ in range(10):
                        context.post(kind, f"{kind}.{number % 20}", tensors, blocking=True).wait()

        world.run(call)
        before = resident_nbytes()
        world.run(call)
        assert resident_nbytes() - before < 4 << 20
