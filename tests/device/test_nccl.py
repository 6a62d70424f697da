"""Collectives of tensors on GPUs, one per rank, by NCCL.

No GPU is used: driver and NCCL are fakes (fake_cuda.c, fake_nccl.c). The tests cover this project's part: the agreement
on NCCL, the order of events, the choice of path, results, and failures. Expected: NumPy, on values whose sums are exact
in any order.
"""
import threading

import numpy as np
import pytest

from bagua_hvd.core import native, vectors
from bagua_hvd.core.exceptions import HorovodInternalError
from device_arrays import FakePlacement, fake_cuda, nccl_steps, open_device, own_device, sums_overwritten_in_flight
from gpu_hosts import REDUCED, groups, placements
from values import make
from world import DTYPES, World

WORLDS = pytest.mark.parametrize("n, transport", [(1, "inproc"), (2, "shm"), (3, "tcp")])


@pytest.fixture
def world(n, transport):
    with World(n, transport) as world:
        yield world


def as_float(values, dtype):
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else values


@WORLDS
@pytest.mark.parametrize("dtype", REDUCED)
def test_allreduce(world, n, dtype):
    """One tensor, and several as one vector; in place and not."""
    counts = [1, 5, 4099, 0, 300]
    at = placements(n)

    def call(rank, context):
        values = [make(dtype, count, rank, n) for count in counts]
        arrays = [at[rank].array(x, dtype) for x in values]
        out = at[rank].empty((counts[2],), dtype)
        context.post(native.ALLREDUCE, "one", [arrays[2].view(out)], op=native.OP_SUM).wait()
        context.post(native.ALLREDUCE, "again", [arrays[2].view(out)], op=native.OP_MAX).wait()
        maxima = out.numpy()
        context.post(native.ALLREDUCE, "many", [array.view(array) for array in arrays], op=native.OP_SUM).wait()
        return values, maxima, [array.numpy() for array in arrays]

    before = groups()
    outcomes = world.run(call)
    assert groups() - before == 3 * n
    for i in range(len(counts)):
        inputs = [as_float(values[i], dtype) for values, *_ in outcomes]
        for _, maxima, sums in outcomes:
            np.testing.assert_array_equal(as_float(sums[i], dtype), np.sum(inputs, axis=0).astype(inputs[0].dtype))
            if i == 2:
                np.testing.assert_array_equal(as_float(maxima, dtype), np.max(inputs, axis=0))


@WORLDS
def test_factors_and_averages(world, n):
    """Scaled on the device as on the CPU: equal bit for bit to the same operation in host memory."""
    at = placements(n)

    def call(rank, context):
        results = []
        for dtype in ("float32", "float64", "float16", "bfloat16"):
            values = make(dtype, 1000, rank, n)
            array, host = at[rank].array(values, dtype), values.copy()
            arguments = {"op": native.OP_AVERAGE, "prescale_factor": 0.5, "postscale_factor": 3.0}
            context.post(native.ALLREDUCE, f"gpu.{dtype}", [array.view(array)], **arguments).wait()
            view = native.TensorView(host.ctypes.data, host.ctypes.data, host.shape, DTYPES[dtype], host)
            context.post(native.ALLREDUCE, f"host.{dtype}", [view], **arguments).wait()
            results.append((array.numpy(), host))
        return results

    for results in world.run(call):
        for got, expected in results:
            np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))


@WORLDS
@pytest.mark.parametrize("dtype", ["float32", "int16", "bool"])
def test_what_moves_data_takes_every_dtype(world, n, dtype):
    at = placements(n)

    def call(rank, context):
        context.post(native.BROADCAST, "agree", [(first := at[rank].array(np.zeros(1, np.float32))).view(first)]).wait()
        values = make(dtype, 6 * (rank + 1), rank, n).reshape(-1, 2)
        array = at[rank].array(values, dtype)
        gathered = context.post(native.ALLGATHER, "gather", [array.view()])
        even = at[rank].array(make(dtype, 2 * n, rank, n), dtype)
        exchanged = context.post(native.ALLTOALL, "exchange", [even.view()], splits=[2] * n)
        same = context.post(native.ALLGATHER, "same", [even.view()])
        straight = at[rank].empty((2 * n * n,), dtype)
        into = context.post(native.ALLGATHER, "into", [even.view(straight)])
        root = at[rank].array(make(dtype, 9, rank, n), dtype)
        spread = context.post(native.BROADCAST, "spread", [root.view(root)], root_rank=n - 1)
        results = []
        for operation, row in ((gathered, (2,)), (exchanged, ()), (same, ())):
            operation.wait()
            out = at[rank].empty((operation.device_rows(0), *row), dtype)
            operation.copy_result(0, out.address)
            with pytest.raises(ValueError, match="no result 0"):
                operation.result(0)
            results.append(out.numpy())
        into.wait()
        np.testing.assert_array_equal(straight.numpy(), results[2])
        spread.wait()
        return values, make(dtype, 2 * n, rank, n), results, exchanged.received_splits(0, n), root.numpy()

    before = groups()
    outcomes = world.run(call)
    assert groups() - before >= 4 * n
    for rank, (_, _, (gathered, exchanged, same), splits, root) in enumerate(outcomes):
        np.testing.assert_array_equal(gathered, np.concatenate([values for values, *_ in outcomes]))
        np.testing.assert_array_equal(same, np.concatenate([even for _, even, *_ in outcomes]))
        sent = [even[2 * rank:2 * rank + 2] for _, even, *_ in outcomes]
        np.testing.assert_array_equal(exchanged, np.concatenate(sent))
        assert splits == [2] * n
        np.testing.assert_array_equal(root, make(dtype, 9, n - 1, n))


@WORLDS
@pytest.mark.parametrize("extra", [0, 1])
def test_reducescatter(world, n, extra):
    """Equal parts, and parts of which the first ranks' have one more row."""
    rows = 4 * n + extra
    at = placements(n)

    def call(rank, context):
        values = make("float32", 3 * rows, rank, n).reshape(rows, 3)
        array, out = at[rank].array(values), at[rank].empty((4 + (rank < extra), 3), "float32")
        context.post(native.REDUCESCATTER, "scatter", [array.view(out)], op=native.OP_AVERAGE,
                     prescale_factor=2.0).wait()
        return values, out.numpy()

    outcomes = world.run(call)
    mean = (2 * sum(values for values, _ in outcomes) * np.float32(1 / n)).astype(np.float32)
    np.testing.assert_array_equal(np.concatenate([part for _, part in outcomes]), mean)


@WORLDS
def test_what_nccl_does_not_take_goes_by_way_of_the_host(world, n):
    at = placements(n)

    def call(rank, context):
        results = []
        for dtype, op in (("float32", native.OP_SUM), ("int16", native.OP_SUM), ("bool", native.OP_MAX),
                          ("int32", native.OP_AVERAGE)):
            array = at[rank].array(make(dtype, 40, rank, n), dtype)
            before = groups()
            context.post(native.ALLREDUCE, f"sum.{dtype}", [array.view(array)], op=op).wait()
            context.post(native.BARRIER, f"after.{dtype}").wait()
            results.append((array.numpy(), groups() - before))
        return results

    outcomes = world.run(call)
    for i, dtype in enumerate(("float32", "int16", "bool")):
        expected = np.sum([make(dtype, 40, rank, n) for rank in range(n)], axis=0).astype(dtype)
        for results in outcomes:
            np.testing.assert_array_equal(results[i][0], expected)
            assert (results[i][1] > 0) == (dtype == "float32")


def test_without_kernels_averages_go_by_way_of_the_host():
    with World(2, "shm") as world:
        def call(rank, context):
            placement = FakePlacement(own_device(rank, kernels=rank == 0))
            array = placement.array(np.full(10, 2.0 * rank, np.float32))
            before = groups()
            context.post(native.ALLREDUCE, "mean", [array.view(array)], op=native.OP_AVERAGE).wait()
            context.post(native.BARRIER, "barrier").wait()
            between = groups()
            mean = array.numpy()
            context.post(native.BARRIER, "barrier").wait()
            context.post(native.ALLREDUCE, "sum", [array.view(array)], op=native.OP_SUM).wait()
            context.post(native.BARRIER, "barrier").wait()
            return mean, between - before, array.numpy(), groups() - between

        for mean, staged, total, by_nccl in world.run(call):
            np.testing.assert_array_equal(mean, np.full(10, 1.0))
            np.testing.assert_array_equal(total, np.full(10, 2.0))
            assert (staged, by_nccl) == (0, 2)


@pytest.mark.parametrize("reason", ["a shared GPU", "no NCCL on one", "another NCCL"])
def test_all_use_nccl_or_none(monkeypatch, reason):
    before = groups()
    with World(2, "shm") as world:
        def call(rank, context):
            device = own_device(rank)
            if reason == "a shared GPU":
                device = own_device(0)
            elif rank == 1:
                device = odd
            array = FakePlacement(device).array(np.full(10, rank + 1.0, np.float32))
            for step in range(3):
                context.post(native.ALLREDUCE, f"x.{step}", [array.view(array)], op=native.OP_MAX).wait()
            return array.numpy()

        if reason == "another NCCL":
            monkeypatch.setenv("BHVD_FAKE_NCCL_VERSION", "22000")
        odd = open_device(1, nccl=reason != "no NCCL on one")
        for values in world.run(call):
            np.testing.assert_array_equal(values, np.full(10, 2.0))
    assert groups() == before


@pytest.mark.parametrize("n, transport", [(2, "shm"), (3, "tcp")])
def test_the_frameworks_stream_orders_everything(world, n):
    """Written just before, read and overwritten just after, many in flight and fused, no synchronization in between."""
    at = placements(n)

    def call(rank, context):
        return sums_overwritten_in_flight(at[rank], rank, context, 10)

    for copies in world.run(call):
        for step, values in enumerate(copies):
            np.testing.assert_array_equal(values, np.full(5000, sum(rank + step for rank in range(n))))


@pytest.mark.parametrize("n, transport", [(3, "tcp")])
def test_process_sets_have_communicators_of_their_own(world, n):
    at = placements(n)

    def call(rank, context):
        added = context.post(native.PROCESS_SET_ADD, "add", splits=[0, 2])
        added.wait()
        total = at[rank].array(np.full(8, rank + 1.0, np.float32))
        part = at[rank].array(np.full(8, rank + 1.0, np.float32))
        operations = [context.post(native.ALLREDUCE, "all", [total.view(total)])]
        if rank != 1:
            operations.append(context.post(native.ALLREDUCE, "part", [part.view(part)], process_set=added.value))
        for operation in operations:
            operation.wait()
        context.post(native.PROCESS_SET_REMOVE, "remove", root_rank=added.value).wait()
        return total.numpy(), part.numpy()

    for rank, (total, part) in enumerate(world.run(call)):
        np.testing.assert_array_equal(total, np.full(8, 6.0))
        np.testing.assert_array_equal(part, np.full(8, 2.0 if rank == 1 else 4.0))


@pytest.mark.long
@pytest.mark.parametrize("way", ["shutdown", "remove"])
def test_a_gpu_that_is_behind_finishes_before_its_communicator_goes(way):
    """Operations end when enqueued: one may still run on the GPU, and on its peers', when ranks leave."""
    with World(3, "shm") as world:
        at = placements(3)

        def call(rank, context):
            added = context.post(native.PROCESS_SET_ADD, "add", splits=[0, 1])
            added.wait()
            array = at[rank].array(np.full(8, rank + 1.0, np.float32))
            for name in ("agreed", "late") if rank < 2 else ():
                if name == "late" and rank == 1:
                    release = fake_cuda().hold(at[rank].current)
                    threading.Timer(7, release).start()         # longer than NCCL's time limit for closing
                context.post(native.ALLREDUCE, name, [array.view(array)], process_set=added.value).wait()
            if way == "shutdown":
                context.shutdown()
            else:
                context.post(native.PROCESS_SET_REMOVE, "remove", root_rank=added.value).wait()
            return array.numpy()

        for rank, values in enumerate(world.run(call)):
            np.testing.assert_array_equal(values, np.full(8, 6.0 if rank < 2 else 3.0))


@pytest.mark.parametrize("n, transport", [(2, "shm"), (3, "tcp")])
def test_a_rank_that_has_joined_counts_as_zeros(world, n):
    at = placements(n)

    def call(rank, context):
        sums = []
        for step in range(3 if rank < n - 1 else 1):
            arrays = [at[rank].array(np.full(size, 1.0 + rank, np.float32)) for size in (12, 7)]
            views = [array.view(array) for array in arrays[:1 + step % 2]]
            context.post(native.ALLREDUCE, f"step.{step}", views).wait()
            sums.append(arrays[0].numpy())
        context.post(native.JOIN, "join").wait()
        return sums

    before = groups()
    outcomes = world.run(call)
    assert groups() - before == 3 * n
    for sums in outcomes[:-1]:
        for step, values in enumerate(sums):
            np.testing.assert_array_equal(values, np.full(12, sum(range(1, n + (step == 0)))))


@pytest.mark.parametrize("n, transport", [(2, "shm")])
def test_results_on_the_host(world, n):
    """Results for algorithms that compute on flat arrays are complete when wait() returns."""
    at = placements(n)

    def call(rank, context):
        array = at[rank].array(np.full(700, rank + 1.0, np.float32))
        out = np.zeros(700, np.float32)
        for step in range(3):
            out[:] = 0
            context.post(native.ALLREDUCE, f"x.{step}", vectors.views_into([array.view()], out)).wait()
            np.testing.assert_array_equal(out, np.full(700, 3.0))

    before = groups()
    world.run(call)
    assert groups() - before == 3 * n


@pytest.mark.parametrize("n, transport", [(2, "shm")])
def test_another_gpu_than_before(world, n):
    at = placements(n + 1)

    def call(rank, context):
        array, elsewhere = (placement.array(np.ones(4, np.float32)) for placement in (at[rank], at[n]))
        context.post(native.ALLREDUCE, "first", [array.view(array)]).wait()
        with pytest.raises(HorovodInternalError, match="is on GPU 2, but this rank's process set communicates by NCCL "
                                                       f"on GPU {rank}: keep to one GPU, or set BAGUA_HVD_NCCL=0"):
            context.post(native.ALLREDUCE, "second", [elsewhere.view(elsewhere)])

    world.run(call)


# ---------------------------------------------------------------------------------------------- processes, failures


def _own_gpus(n, **more):
    return [{"BHVD_FAKE_CUDA_UUID": f"gpu{rank}", **more} for rank in range(n)]


def test_processes(run_ranks):
    for rank in run_ranks(3, nccl_steps, arguments={"steps": 5}, env=_own_gpus(3)):
        assert "mean 1.0 5" in rank.output


def test_an_error_that_nccl_reports_ends_the_job_on_all_ranks(run_ranks):
    env = _own_gpus(2)
    env[1]["BHVD_FAKE_NCCL_FAIL_AFTER"] = "3"
    for rank in run_ranks(2, nccl_steps, arguments={"steps": 100_000}, env=env):
        assert "failed: rank 1: NCCL 2.21.5 with CUDA 13.0 on GPU 0: it failed" in rank.output
        assert "remote process exited or there was a network error: the stand-in was told to fail" in rank.output


def test_a_rank_that_dies_leaves_no_stream_hanging(run_ranks):
    ranks = run_ranks(2, nccl_steps, arguments={"steps": 100_000, "dying": 1}, env=_own_gpus(2), check=False)
    assert "failed: rank 1 was lost" in ranks[0].output
