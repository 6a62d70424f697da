"""In two levels, operations on parts of ranks (native/collective/nccl_levels_*.c): reducescatter, allgather.

As in test_nccl_levels.py, no GPU takes part. The measure is the CPU: the same operation in the host's memory, on the
same ranks, of values whose sums are exact in any order, so that every bit is equal.
"""
import numpy as np
import pytest

from bagua_hvd.common import native
from gpu_hosts import REDUCED, groups, on_hosts, placements
from world import bfloat16_bits, result, storage, view

# Equal hosts, three with ranks dealt in turn, unequal ones, two shards for three ranks, hosts with a single rank.
LAYOUTS = ["AABB", "ABCABC", "AAB", "ABBAB", "ABBBC"]


@pytest.fixture(params=LAYOUTS, scope="module")
def world(request):
    with on_hosts(request.param) as world:
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
