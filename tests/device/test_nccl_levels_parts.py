"""In two levels, operations on parts of ranks (native/gpu/nccl_levels_*.c).

As in test_nccl_levels.py, no GPU takes part. The measure is the CPU: the same operation in the host's memory, on the
same ranks, of values whose sums are exact in any order, so that every bit is equal.
"""
import os
import signal

import numpy as np
import pytest

from bagua_hvd.core import native
from bagua_hvd.core.exceptions import HorovodInternalError
from device_arrays import FakePlacement, fake_cuda, own_device
from gpu_hosts import REDUCED, groups, on_hosts, placements
from two_levels import environments
from world import bfloat16_bits, result, storage, view

# Equal hosts, three with ranks dealt in turn, unequal ones, two shards for four ranks, hosts with a single rank.
LAYOUTS = ["AABB", "ABCABC", "AAB", "ABBABB", "ABBBC"]


@pytest.fixture(params=LAYOUTS, scope="module")
def world(request):
    with on_hosts(request.param) as world:
        world.letters = request.param
        yield world


def make(dtype, shape, rank):
    """Values that do not repeat soon; sums of six ranks' are exact in every dtype."""
    i = np.arange(np.prod(shape))
    values = ((i * i // 3 + 5 * rank) % 13).reshape(shape)
    return bfloat16_bits(values) if dtype == "bfloat16" else values.astype(dtype)


def rows_of(dim0, rank, n):
    return dim0 // n + (rank < dim0 % n)


class Scattered:
    """A reducescatter of the same values on the GPU and on the CPU, posted by a rank."""

    def __init__(self, rank, context, placement, n, name, dtype, shape, **options):
        values = make(dtype, shape, rank)
        rows = (rows_of(shape[0], rank, n), *shape[1:])
        self.input, self.output = placement.array(values, dtype), placement.empty(rows, dtype)
        self.values, self.expected = values, np.empty(rows, storage(dtype))
        self.operations = [
            context.post(native.REDUCESCATTER, f"gpu.{name}", [self.input.view(self.output)], **options),
            context.post(native.REDUCESCATTER, f"cpu.{name}", [view(values, dtype, self.expected)], **options)]

    def check(self):
        for operation in self.operations:
            operation.wait()
        np.testing.assert_array_equal(self.output.numpy().view(np.uint8), self.expected.view(np.uint8))
        np.testing.assert_array_equal(self.input.numpy().view(np.uint8), self.values.view(np.uint8))


def test_reducescatter(world):
    """Every dtype that NCCL reduces; equal parts, parts with one row more, none for some ranks or for all."""
    n, at = world.n, placements(world.n)
    shapes = [(2 * n, 3), (2 * n + 1, 7), (n - 1, 50), (0, 4), (1, 1), (300 * n + 2, 5)]

    def call(rank, context):
        posted = [Scattered(rank, context, at[rank], n, f"{dtype}.{i}", dtype, shape)
                  for dtype in REDUCED for i, shape in enumerate(shapes)]
        for one in posted:
            one.check()

    before = groups()
    world.run(call)
    assert groups() - before >= len(REDUCED) * (len(shapes) - 1) * n


def test_averages_and_factors(world):
    """What comes last is done on the CPU, of integers too."""
    n, at = world.n, placements(world.n)
    scaled = {"op": native.OP_AVERAGE, "prescale_factor": 0.5, "postscale_factor": 3.0}
    cases = [("int32", {"op": native.OP_AVERAGE, "postscale_factor": 3.0}), ("uint8", {"op": native.OP_AVERAGE}),
             *((dtype, scaled) for dtype in ("float16", "float32", "float64", "bfloat16"))]

    def call(rank, context):
        posted = [Scattered(rank, context, at[rank], n, i, dtype, (3 * n + 1, 11), **options)
                  for i, (dtype, options) in enumerate(cases)]
        for one in posted:
            one.check()

    before = groups()
    world.run(call)
    assert groups() - before >= len(cases) * n


@pytest.mark.parametrize("letters", ["AABB", "ABBAB"])
def test_reducescatter_of_several_pieces(letters):
    """Parts longer than what is on the wire at a time: of two levels' pieces of 4 MiB, half or less."""
    n = len(letters)
    with on_hosts(letters) as world:
        at = placements(n)

        def call(rank, context):
            Scattered(rank, context, at[rank], n, "long", "float32", (n * 1100 + 1, 500)).check()

        before = groups()
        world.run(call)
        assert groups() - before >= 2 * n


def gathered(operation, placement, dtype, row):
    """What the core allocated on the GPU. An operation that went by way of the host has none there."""
    operation.wait()
    out = placement.empty((operation.device_rows(0), *row), dtype)
    operation.copy_result(0, out.address)
    return out.numpy()


def test_allgather(world):
    """Of any dtype: equal parts, unequal ones, none of some ranks or of all, one of only one rank."""
    n, at = world.n, placements(world.n)
    rows = {"equal": lambda rank: 3, "unequal": lambda rank: 5000 - 700 * rank, "some": lambda rank: 7 * (rank % 2),
            "last": lambda rank: 5 * (rank == n - 1), "none": lambda rank: 0}
    cases = [(dtype, name) for name in rows for dtype in ("uint8", "int16", "bfloat16", "float64")]

    def call(rank, context):
        posted = []
        for dtype, name in cases:
            values = make(dtype, (rows[name](rank), 5), rank)
            array = at[rank].array(values, dtype)
            posted.append((dtype, values, array, context.post(native.ALLGATHER, f"gpu.{dtype}.{name}", [array.view()]),
                           context.post(native.ALLGATHER, f"cpu.{dtype}.{name}", [view(values, dtype)])))
        for dtype, values, array, on_gpu, on_cpu in posted:
            on_cpu.wait()
            got, expected = gathered(on_gpu, at[rank], dtype, (5,)), result(on_cpu, 0, dtype, (5,))
            np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))
            np.testing.assert_array_equal(array.numpy().view(np.uint8), values.view(np.uint8))

    before = groups()
    world.run(call)
    assert groups() - before == n * 4 * (len(rows) - 1)


def test_alltoall(world):
    """Of any dtype: equal and unequal splits, none for some or all, only within hosts or between them, for one rank."""
    n, at, letters = world.n, placements(world.n), world.letters
    near = [[letters[a] == letters[b] for b in range(n)] for a in range(n)]
    splits = {"equal": lambda a, b: 3, "unequal": lambda a, b: 200 * a + 31 * b + 1,
              "some": lambda a, b: 7 * ((a + b) % 2),
              "near": lambda a, b: 9 * near[a][b], "far": lambda a, b: (b + 1) * (not near[a][b]),
              "next": lambda a, b: 4000 * (b == (a + 1) % n), "self": lambda a, b: 5 * (a == b), "none": lambda a, b: 0}
    cases = [(dtype, name) for name in splits for dtype in ("uint8", "int16", "bfloat16", "float64")]

    def call(rank, context):
        posted = []
        for dtype, name in cases:
            sent = [splits[name](rank, other) for other in range(n)]
            values = make(dtype, (sum(sent), 3), rank)
            array = at[rank].array(values, dtype)
            posted.append((dtype, values, array, [
                context.post(native.ALLTOALL, f"{place}.{dtype}.{name}", [tensor], splits=sent)
                for place, tensor in (("gpu", array.view()), ("cpu", view(values, dtype)))]))
        for dtype, values, array, (on_gpu, on_cpu) in posted:
            on_cpu.wait()
            got, expected = gathered(on_gpu, at[rank], dtype, (3,)), result(on_cpu, 0, dtype, (3,))
            np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))
            np.testing.assert_array_equal(array.numpy().view(np.uint8), values.view(np.uint8))
            assert on_gpu.received_splits(0, n) == on_cpu.received_splits(0, n)

    world.run(call)


def test_parts_of_an_alltoall_for_the_same_host_never_leave_the_gpus():
    """What crosses the link to the host, by the stand-in's count: parts of other hosts' ranks, out and back."""
    with on_hosts("AABB") as world:
        at = placements(4)

        def call(rank, context):
            array = at[rank].array(np.full(4, rank, np.float32))
            counts = []
            near = [2, 2, 0, 0] if rank < 2 else [0, 0, 2, 2]
            for name, splits in (("agree", [1] * 4), ("near", near), ("all", [1] * 4)):
                context.post(native.BARRIER, f"before.{name}").wait()
                before = fake_cuda().copies()
                context.post(native.BARRIER, f"begin.{name}").wait()
                context.post(native.ALLTOALL, name, [array.view()], splits=splits).wait()
                fake_cuda().synchronize(at[rank].current)
                context.post(native.BARRIER, f"end.{name}").wait()
                counts.append(fake_cuda().copies() - before)
            return counts

        for _, near, far in world.run(call):
            assert (near, far) == (0, 8)


KINDS = [native.REDUCESCATTER, native.ALLGATHER, native.ALLTOALL]


def posted(context, kind, name, placement, rank, n, process_set=0):
    """Two rows of rank + 1 for each of n ranks; a function that waits, and gives the first value from each rank."""
    array = placement.array(np.full(2 * n, rank + 1, np.float32))
    out = placement.empty((2,), "float32") if kind == native.REDUCESCATTER else None
    more = {"splits": [2] * n} if kind == native.ALLTOALL else {}
    operation = context.post(kind, name, [array.view(out)], process_set=process_set, **more)

    def wait():
        if out is None:
            got = gathered(operation, placement, "float32", ())
        else:
            operation.wait()
            got = out.numpy()
        return got[::2 * n if kind == native.ALLGATHER else 2].astype(int).tolist()

    return wait


def expected_of(kind, ranks):
    return [sum(ranks) + len(ranks)] if kind == native.REDUCESCATTER else [rank + 1 for rank in ranks]


def test_process_sets_and_joined_ranks():
    """A set of unequal hosts has two levels; one member of each, or one host, has one. Joined ranks have no part."""
    sets = [[0, 1, 3], [1, 2], [0, 1]]
    with on_hosts("AABB") as world:
        at = placements(4)

        def call(rank, context):
            results = []
            for members in sets:
                added = context.post(native.PROCESS_SET_ADD, f"add.{members}", splits=members)
                added.wait()
                waiting = [posted(context, kind, f"{kind}.{members}", at[rank], rank, len(members), added.value)
                           for kind in KINDS] if rank in members else []
                results.append([wait() for wait in waiting])
                context.post(native.PROCESS_SET_REMOVE, f"remove.{members}", root_rank=added.value).wait()
            for kind in KINDS if rank else []:
                with pytest.raises(HorovodInternalError, match="is not supported with Join at this time. Rank 0 has"):
                    posted(context, kind, f"joined.{kind}", at[rank], rank, 4)()
            context.post(native.JOIN, "join").wait()
            results.append([posted(context, kind, f"after.{kind}", at[rank], rank, 4)() for kind in KINDS])
            return results

        for rank, results in enumerate(world.run(call)):
            for members, got in zip([*sets, range(4)], results, strict=True):
                assert got == ([expected_of(kind, members) for kind in KINDS] if rank in members else [])


def steps(count, dying=None):
    """The program of a rank: every kind of operation, in whose third step rank `dying` is killed."""
    import bagua_hvd.torch as hvd

    hvd.init()
    placement, rank, n = FakePlacement(own_device(0)), hvd.rank(), hvd.size()
    context = hvd.mpi_ops.basics.context()
    try:
        for step in range(count):
            waiting = [posted(context, kind, f"step.{kind}", placement, rank, n) for kind in KINDS]
            if step == 2 and rank == dying:
                os.kill(os.getpid(), signal.SIGKILL)
            results = [wait() for wait in waiting]
        print("results", results, fake_cuda().nccl_groups() > 0)
    except HorovodInternalError as error:
        placement.cuda.synchronize(placement.current)       # no stream hangs afterwards
        print("failed:", error)


def own_gpus(letters):
    common = {"BAGUA_HVD_NCCL": "local"}
    return [{**mine, "BHVD_FAKE_CUDA_UUID": f"gpu{rank}"} for rank, mine in enumerate(environments(letters, common))]


def test_processes(run_ranks):
    for rank in run_ranks(3, steps, arguments={"count": 4}, env=own_gpus("ABB")):
        assert f"results {[expected_of(kind, range(3)) for kind in KINDS]} True" in rank.output


@pytest.mark.parametrize("dying", [0, 2])
def test_a_rank_that_dies_leaves_no_stream_hanging(run_ranks, dying):
    """One that is alone on its host, and one without a shard."""
    ranks = run_ranks(3, steps, arguments={"count": 100_000, "dying": dying}, env=own_gpus("ABB"), check=False)
    for rank in {0, 1, 2} - {dying}:
        assert f"failed: rank {dying} was lost" in ranks[rank].output
