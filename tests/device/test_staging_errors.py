"""Errors with tensors on a device. As in test_staging.py, no GPU is used."""
import threading

import numpy as np
import pytest

from bagua_hvd.core import native, vectors
from bagua_hvd.core.exceptions import HorovodInternalError
from device_arrays import FakePlacement, fake_cuda, open_device
from world import World, view


@pytest.fixture(params=[(2, "shm"), (4, "tcp")], ids=["2-shm", "4-tcp"])
def world(request):
    with World(*request.param) as world:
        yield world


def test_a_rank_on_the_cpu_is_an_error_on_all(world):
    def call(rank, context):
        placement = FakePlacement()
        values = np.ones(4, np.float32)
        array = placement.array(values)
        mixed = array.view(array) if rank else view(values, "float32", "in place")
        with pytest.raises(HorovodInternalError, match="Mismatched ALLREDUCE CPU/GPU device selection: One rank "
                                                       "specified device"):
            context.post(native.ALLREDUCE, "mixed", [mixed]).wait()
        context.post(native.ALLREDUCE, "after", [array.view(array)]).wait()
        return array.numpy()

    for values in world.run(call):
        np.testing.assert_array_equal(values, np.full(4, world.n))


def test_what_cannot_be_posted(world):
    def call(rank, context):
        placement = FakePlacement()
        array, values = placement.array(np.ones(4, np.float32)), np.ones(4, np.float32)
        context.post(native.BARRIER, "allocated").wait()        # an allocation on any rank would invalidate a capture
        with pytest.raises(ValueError, match="different devices"):
            context.post(native.ALLREDUCE, "two", [array.view(array), view(values, "float32", "in place")])
        with fake_cuda().capture(placement.current), pytest.raises(
                HorovodInternalError, match="while a CUDA graph is being captured"):
            context.post(native.ALLREDUCE, "captured", [array.view(array)])
        context.post(native.BARRIER, "together").wait()

    world.run(call)


def test_nothing_touches_a_stream_that_is_captured(world):
    """Waiting for it and copying flat arrays on it raise an error, and the capture continues."""
    def call(rank, context):
        placement = FakePlacement()
        array, flat = placement.array(np.ones(4, np.float32)), np.empty(4, np.float32)
        operation = context.post(native.ALLREDUCE, "early", [array.view(array)])
        assert operation.ended_within(60)
        context.post(native.BARRIER, "allocated").wait()
        with fake_cuda().capture(placement.current):
            for call in (operation.wait, lambda: vectors.pack([array.view(array)], flat)):
                with pytest.raises(HorovodInternalError, match="while a CUDA graph is being captured"):
                    call()
        context.post(native.BARRIER, "captured").wait()
        operation.wait()
        return array.numpy()

    for values in world.run(call):
        np.testing.assert_array_equal(values, np.full(4, world.n))


def test_rank_0_leaves_while_a_tensor_is_on_its_way():
    """An operation that a neighbour posts then is not lost: it ends, although rank 0 does not take part."""
    with World(3, "tcp") as world:
        held, left = threading.Event(), threading.Event()

        def call(rank, context):
            if rank == 0:
                assert held.wait(20)
                context.shutdown()
                left.set()
                return
            placement = FakePlacement()
            array = placement.array(np.ones(1000, np.float32))
            release = fake_cuda().hold(placement.current)
            operation = context.post(native.D_FP_S, "average", [array.view(array)], topology=1, round=0)
            if rank == 1:
                held.set()
            assert left.wait(20)
            with pytest.raises(HorovodInternalError, match="rank 0 left the job"):
                context.post(native.BARRIER, "barrier").wait()
            release()
            assert operation.ended_within(20)
            with pytest.raises(HorovodInternalError, match="rank 0 left the job"):
                operation.wait()

        world.run(call)


def test_shutdown_with_tensors_on_their_way(world):
    def call(rank, context):
        placement = FakePlacement()
        array = placement.array(np.ones(100_000, np.float32))
        operation = context.post(native.ALLREDUCE, "never", [array.view(array)]) if rank == 0 else None
        context.shutdown()
        if operation:
            with pytest.raises(HorovodInternalError, match="shut down"):
                operation.wait()

    world.run(call)


def test_there_is_no_such_gpu():
    with fake_cuda().devices(1), pytest.raises(ValueError, match=r"there is no GPU 7: the driver \(CUDA 13.0\) has 1"):
        open_device(7)


def test_an_old_driver(monkeypatch):
    monkeypatch.setenv("BHVD_FAKE_CUDA_VERSION", "11020")
    with pytest.raises(HorovodInternalError, match=r"libcuda.so.1 supports CUDA 11.2; bagua_hvd needs at least 11.4"):
        open_device(0)


def _gpu_fails():
    """A rank in a job of two: the first copy of rank 0 fails, as after an illegal access on its GPU."""
    import bagua_hvd.torch as hvd

    hvd.init()
    placement = FakePlacement()
    # A fault while posting is an error of post(). The first copy is that of the array's values.
    release = fake_cuda().hold(placement.current)
    array = placement.array(np.ones(4, np.float32))
    try:
        operation = hvd.mpi_ops.basics.context().post(native.ALLREDUCE, "x", [array.view(array)])
        release()
        operation.wait()
    except HorovodInternalError as error:
        print("failed:", error)


def test_a_gpu_that_fails_ends_the_job(run_ranks):
    """All ranks report the driver's message."""
    for rank in run_ranks(2, _gpu_fails, env=[{"BHVD_FAKE_CUDA_FAIL_AFTER": "1"}, {}]):
        assert ("failed: rank 0: GPU 0: the tensors could not be copied to the host: an illegal memory access was "
                "encountered (CUDA_ERROR_ILLEGAL_ADDRESS)") in rank.output
