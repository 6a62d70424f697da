"""Collectives and primitives of tensors on a device, over every transport: staged through pinned memory.

No GPU is used. The "device" is tests/device/fake_cuda.c, a fake libcuda.so.1 whose memory the host cannot access and
whose streams are slow, so that a missing event or a pointer read on the wrong side fails. Expected: the same operation
in host memory, bit for bit. The tests do not measure a GPU's speed.
"""
import numpy as np
import pytest

from bagua_hvd.core import native, vectors
from device_arrays import FakePlacement, emulation, fake_cuda, fake_device, names, sums_overwritten_in_flight
from values import make
from world import DTYPES, World, result, view

SHAPES = [(0,), (1,), (3, 5), (4099,), (70, 130)]
pytestmark = pytest.mark.parametrize("n, transport", [(1, "inproc"), (2, "shm"), (4, "tcp")])


@pytest.fixture
def world(n, transport):
    with World(n, transport) as world:
        yield world


def on_both(world, inputs, post):
    """The results of `post(context, tensors, name)` in host and in device tensors: two lists, by rank."""
    def call(rank, context):
        placement = FakePlacement()
        host = [values.copy() for values in inputs[rank]]
        device = [placement.array(values, dtype) for values, dtype in zip(inputs[rank], dtypes, strict=True)]
        name = f"host.{first}"
        post(context, [view(values, dtype, "in place") for values, dtype in zip(host, dtypes, strict=True)], name)
        post(context, [array.view(array) for array in device], f"device.{first}")
        return host, [array.numpy() for array in device]

    first = next(names)
    dtypes = inputs.dtypes
    return world.run(call)


class Inputs(list):
    def __init__(self, n, dtypes, shapes):
        self.dtypes = [dtype for dtype in dtypes for _ in shapes]
        for rank in range(n):
            self.append([make(dtype, int(np.prod(shape)), rank, n).reshape(shape)
                         for dtype in dtypes for shape in shapes])


@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce_and_broadcast(world, dtype):
    inputs = Inputs(world.n, [dtype], SHAPES)
    for kind, arguments in [(native.ALLREDUCE, {"op": native.OP_SUM}), (native.BROADCAST, {"root_rank": world.n - 1})]:
        def post(context, views, name, kind=kind, arguments=arguments):
            posted = [context.post(kind, f"{name}.{kind}.{i}", [one], **arguments) for i, one in enumerate(views)]
            for operation in posted:
                operation.wait()

        for host, device in on_both(world, inputs, post):
            for expected, got in zip(host, device, strict=True):
                np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))


def test_a_group_of_all_dtypes(world):
    inputs = Inputs(world.n, DTYPES, SHAPES[1:4])

    def post(context, views, name):
        context.post(native.ALLREDUCE, name, views, op=native.OP_MAX, blocking=True).wait()

    for host, device in on_both(world, inputs, post):
        for expected, got in zip(host, device, strict=True):
            np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("codec", [native.lib.BHVD_CODEC_MINMAX_UINT8, native.lib.BHVD_CODEC_SIGN])
def test_primitives(world, codec):
    inputs = Inputs(world.n, ["float32"], SHAPES)
    for kind, arguments in [(native.C_LP_S, {"codec": codec, "op": native.OP_AVERAGE}), (native.D_FP_S, {"round": 1})]:
        def post(context, views, name, kind=kind, arguments=arguments):
            context.post(kind, f"{name}.{kind}", views, **arguments).wait()

        for host, device in on_both(world, inputs, post):
            for expected, got in zip(host, device, strict=True):
                np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))


def test_results_of_other_shapes(world):
    """allgather and alltoall stay on the host until the front end takes them; reducescatter returns to the device."""
    n = world.n
    rows = 3 * n + 1

    def call(rank, context):
        placement = FakePlacement()
        values = (np.arange(rows * 2, dtype=np.float32) + 100 * rank).reshape(rows, 2)
        array = placement.array(values)
        gathered = context.post(native.ALLGATHER, "gather", [array.view()])
        splits = [3] * n
        exchanged = context.post(native.ALLTOALL, "exchange", [array.view()], splits=splits)
        mine = 3 + (rank == 0)
        out = placement.empty((mine, 2), "float32")
        scattered = context.post(native.REDUCESCATTER, "scatter", [array.view(out)])
        for operation in (scattered, exchanged, gathered):
            operation.wait()
        return values, result(gathered, 0, "float32", (2,)), result(exchanged, 0, "float32", (2,)), out.numpy()

    for rank, (_, gathered, exchanged, scattered) in enumerate(outcomes := world.run(call)):
        inputs = [values for values, *_ in outcomes]
        np.testing.assert_array_equal(gathered, np.concatenate(inputs))
        np.testing.assert_array_equal(exchanged, np.concatenate([values[3 * rank:3 * rank + 3] for values in inputs]))
        begin = 3 * rank + (rank > 0)
        np.testing.assert_array_equal(scattered, sum(inputs)[begin:begin + len(scattered)])


def test_results_of_other_shapes_go_where_they_are_wanted(world):
    """allgather and alltoall with dst on the device, small and large; one alltoall in which only rank 0 gets rows."""
    n = world.n

    def call(rank, context):
        placement = FakePlacement()
        outcomes = []
        for rows in (3, 1 << 17):
            array = placement.array(np.arange(rows * 4, dtype=np.float32).reshape(rows, 4) + rank)
            even = placement.array(np.full((n, 2), rank, np.float32))
            gathered, exchanged = placement.empty((n * rows, 4), "float32"), placement.empty((n, 2), "float32")
            collected = placement.empty((n, rows * 4), "float32")
            row = placement.array(np.full((1, rows * 4), rank, np.float32))
            posted = [
                context.post(native.ALLGATHER, f"gather.{rows}", [array.view(gathered)]),
                context.post(native.ALLTOALL, f"exchange.{rows}", [even.view(exchanged)]),
                context.post(native.ALLTOALL, f"collect.{rows}", [row.view(None if rank else collected)],
                             splits=[1] + [0] * (n - 1)),
            ]
            for operation in posted:
                operation.wait()
            outcomes.append((array.numpy(), gathered.numpy(), exchanged.numpy(), None if rank else collected.numpy()))
        return outcomes

    ranks = np.arange(n, dtype=np.float32)
    for rank, outcomes in enumerate(by_rank := world.run(call)):
        for size, (_, gathered, exchanged, collected) in enumerate(outcomes):
            np.testing.assert_array_equal(gathered, np.concatenate([other[size][0] for other in by_rank]))
            np.testing.assert_array_equal(exchanged, np.repeat(ranks, 2).reshape(n, 2))
            if rank == 0:
                np.testing.assert_array_equal(collected, np.repeat(ranks, collected.shape[1]).reshape(n, -1))


def test_a_stream_of_another_thread(world):
    """A tensor is read in the order of the stream passed to post(), whatever the current stream is."""
    def call(rank, context):
        placement = FakePlacement()
        wrote = placement.current
        release = fake_cuda().hold(wrote)
        array = placement.array(np.full(1000, rank + 1, np.float32))
        placement.current = fake_cuda().stream()
        operation = context.post(native.ALLREDUCE, "elsewhere", [array.view(array)], stream=wrote)
        assert not operation.done()
        release()
        operation.wait()
        return array.numpy()

    for values in world.run(call):
        np.testing.assert_array_equal(values, np.full(1000, world.n * (world.n + 1) / 2))


def test_the_frameworks_stream_orders_everything(world):
    """Written just before, read and overwritten just after, many in flight, no synchronization in between."""
    def call(rank, context):
        return sums_overwritten_in_flight(FakePlacement(), rank, context, 8)

    for copies in world.run(call):
        for step, values in enumerate(copies):
            np.testing.assert_array_equal(values, np.full(5000, sum(rank + step for rank in range(world.n))))


def test_flat_copies_and_results_on_the_host(world):
    """As in algorithms that compute on flat arrays: pack, unpack, and results of a primitive on the host."""
    def call(rank, context):
        placement = FakePlacement()
        members = [placement.array(make("bfloat16", count, rank, world.n), "bfloat16") for count in (5, 0, 300)]
        views = [array.view(array) for array in members]
        flat = np.empty(305, np.float32)
        vectors.pack(views, flat)
        vectors.unpack(views, flat * 2)
        weights = placement.array(np.full(7, rank, np.float32))
        out, host = np.empty(7, np.float32), np.full(7, rank, np.float32)
        context.post(native.D_FP_S, "mean", vectors.views_into([weights.view(weights)], out), round=0).wait()
        context.post(native.D_FP_S, "host", [view(host, "float32", "in place")], round=0).wait()
        return flat, np.concatenate([array.numpy() for array in members]), weights.numpy(), out, host

    for rank, (flat, doubled, weights, out, host) in enumerate(world.run(call)):
        expected = np.concatenate([make("bfloat16", count, rank, world.n) for count in (5, 0, 300)])
        np.testing.assert_array_equal((expected.astype(np.uint32) << 16).view(np.float32), flat)
        np.testing.assert_array_equal((doubled.astype(np.uint32) << 16).view(np.float32), 2 * flat)
        np.testing.assert_array_equal(weights, np.full(7, rank))
        np.testing.assert_array_equal(out, host)


def test_a_rank_that_has_joined_counts_as_zeros(world):
    def call(rank, context):
        placement = FakePlacement()
        if rank < world.n - 1:
            array = placement.array(np.full((3, 4), 1 + rank, np.float32))
            context.post(native.ALLREDUCE, "rest", [array.view(array)]).wait()
            np.testing.assert_array_equal(array.numpy(), np.full((3, 4), sum(range(1, world.n))))
        joined = context.post(native.JOIN, "join")
        joined.wait()
        return joined.value

    assert len(set(world.run(call))) == 1


def test_pinned_memory_is_used_again(world):
    """A second round reuses buffers of the first one, and still gets its own values."""
    def call(rank, context):
        placement = FakePlacement()
        results = []
        for step in range(6):
            array = placement.array(np.full(3000, step + rank, np.float32))
            context.post(native.ALLREDUCE, f"again.{step}", [array.view(array)], blocking=True).wait()
            results.append(array.numpy())
        return results

    for results in world.run(call):
        for step, values in enumerate(results):
            np.testing.assert_array_equal(values, np.full(3000, sum(step + rank for rank in range(world.n))))


def test_small_tensors_cross_the_link_by_one_copy(world):
    """With a device kernel, here compiled for the CPU: packed and unpacked on the device by one launch each."""
    kernels = emulation()

    def call(rank, context):
        placement = FakePlacement()
        rows = [placement.array(np.full(size, rank + size, np.float32)) for size in (1, 7, 1 << 18, 4096, 20000, 33)]
        context.post(native.ALLREDUCE, "kernel", [row.view(row) for row in rows]).wait()
        return [row.numpy() for row in rows]

    before, copies = fake_cuda().launches(), fake_cuda().copies()
    fake_device().set_kernels({"copy_spans": kernels.handle("copy_spans")}, kernels)
    outcomes = world.run(call)
    fake_device().set_kernels({"copy_spans": 0}, None)
    assert fake_cuda().launches() - before == 2 * world.n
    # In each direction: the launch table, all small tensors, the large one; and the copies of the test's own arrays.
    assert fake_cuda().copies() - copies == (2 * 3 + 2 * 6) * world.n
    for rows in outcomes:
        for row in rows:
            np.testing.assert_array_equal(row, np.full(row.size, sum(rank + row.size for rank in range(world.n))))
