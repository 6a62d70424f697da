"""Hazards of GPU tensors: hung kernels, slow starts, contexts, captured graphs, pinned memory.

No GPU is used: driver and NCCL are fakes (fake_cuda.c, fake_nccl.c), which wait and refuse as the real ones do.
"""
import sys
import threading
import types

import numpy as np
import pytest

from bagua_hvd.core import native
from bagua_hvd.core.device import KERNELS, Kernels
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.core.util import in_window
from device_arrays import FakePlacement, emulation, fake_cuda, open_device, own_device
from gpu_hosts import placements
from world import World


def _gpus(n, **more):
    return [{"BHVD_FAKE_CUDA_UUID": f"gpu{rank}", **more} for rank in range(n)]


def _hung_set(steps):
    """Rank 2's kernel of a process set hangs, so rank 0's and all later work hangs too. Then rank 2 is killed."""
    import os
    import signal
    import time

    import bagua_hvd.torch as hvd

    hvd.init(process_sets="dynamic")
    context, placement = hvd.mpi_ops.basics.context(), FakePlacement(own_device(0, kernels=False))
    part = hvd.add_process_set([0, 2])
    array, other = (placement.array(np.ones(2000, np.float32)) for _ in range(2))

    def add(name, process_set=0):
        context.post(native.ALLREDUCE, name, [array.view(array)], process_set=process_set).wait()

    def in_part(name):
        if hvd.rank() != 1:
            context.post(native.ALLREDUCE, name, [other.view(other)], process_set=part.process_set_id).wait()

    add("all")
    in_part("part")
    in_part("hangs")                    # the third group of rank 2
    add("behind")
    hvd.barrier()
    if hvd.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        for step in range(steps):
            add(f"step.{step}")
            time.sleep(0.01)
    except HorovodInternalError as error:
        placement.cuda.synchronize(placement.current)
        print("failed:", error, time.monotonic() - begin)


@pytest.mark.parametrize("version", ["22105", "22203"], ids=["by threads", "in a group"])
def test_all_communicators_are_aborted_together(run_ranks, version):
    """An abort waits for the GPU, so aborting one communicator first would wait for the kernel of the other."""
    env = _gpus(3, BHVD_FAKE_NCCL_VERSION=version)
    env[2] |= {"BHVD_FAKE_NCCL_FAIL_AFTER": "3", "BHVD_FAKE_NCCL_HANG": "1"}
    ranks = run_ranks(3, _hung_set, arguments={"steps": 100_000}, env=env, check=False, timeout=90)
    for rank in ranks[:2]:
        assert "failed: rank 2 was lost" in rank.output


def _allreduces(steps):
    import bagua_hvd.torch as hvd

    hvd.init()
    context, placement = hvd.mpi_ops.basics.context(), FakePlacement(own_device(0, kernels=False))
    array = placement.array(np.ones(2000, np.float32))
    try:
        for step in range(steps):
            context.post(native.ALLREDUCE, f"step.{step}", [array.view(array)]).wait()
            hvd.barrier()
        print("sum", array.numpy().sum())
    except HorovodInternalError as error:
        print("failed:", error)


def test_a_communicator_may_take_longer_than_the_limit_of_links(run_ranks):
    """Its creation and its first collective may: on many hosts they take more than half a minute."""
    env = _gpus(2, BHVD_FAKE_NCCL_SLOW_MS="2500", HOROVOD_GLOO_TIMEOUT_SECONDS="1")
    for rank in run_ranks(2, _allreduces, arguments={"steps": 2}, env=env, timeout=120):
        assert "sum 8000.0" in rank.output


def test_a_collective_that_hangs_in_silence_ends_the_job(run_ranks):
    """NCCL reports no error and operations end when enqueued, so only the GPU's own event shows the hang."""
    env = _gpus(2, HOROVOD_GLOO_TIMEOUT_SECONDS="0.2")
    env[1] |= {"BHVD_FAKE_NCCL_FAIL_AFTER": "2", "BHVD_FAKE_NCCL_HANG": "1"}
    for rank in run_ranks(2, _silent, env=env, timeout=120):
        assert "has not finished a collective by NCCL for 4.0 s, and NCCL reports no error" in rank.output


def _silent():
    import time

    import bagua_hvd.torch as hvd

    hvd.init()
    context, placement = hvd.mpi_ops.basics.context(), FakePlacement(own_device(0, kernels=False))
    array = placement.array(np.ones(2000, np.float32))
    for step in range(2):
        context.post(native.ALLREDUCE, f"step.{step}", [array.view(array)]).wait()
    try:
        while True:
            hvd.barrier()
            time.sleep(0.05)
    except HorovodInternalError as error:
        print("failed:", error)


def test_a_busy_gpu_is_no_failure():
    """Results on the host wait for earlier work on the framework's stream, without a timeout."""
    at = placements(2)
    with World(2, "shm", timeout_ms=500) as world:
        def call(rank, context):
            array, out = at[rank].array(np.full(700, rank + 1.0, np.float32)), np.zeros(700, np.float32)
            context.post(native.ALLREDUCE, "agree", [array.view(array)]).wait()
            release = fake_cuda().hold(at[0].current) if rank == 0 else None
            view = array.view()._replace(dst=out.ctypes.data, dst_on_host=True)
            operation = context.post(native.ALLREDUCE, "busy", [view])
            if release:
                threading.Timer(1.5, release).start()
            operation.wait()
            return out

        for out in world.run(call):
            np.testing.assert_array_equal(out, np.full(700, 6.0))


def test_a_graph_may_be_captured_meanwhile():
    """Another thread captures in the global mode, and no call of the core for other streams invalidates the graph."""
    at, ready = placements(2), threading.Barrier(3, timeout=60)
    captured = fake_cuda().stream()
    with World(2, "shm") as world:
        def call(rank, context):
            array = at[rank].array(np.full(5000, rank + 1.0, np.float32))
            context.post(native.ALLREDUCE, "agree", [array.view(array)]).wait()
            fake_cuda().synchronize(at[rank].current)
            ready.wait()
            ready.wait()
            for step in range(3):
                context.post(native.ALLREDUCE, f"during.{step}", [array.view(array)]).wait()
                context.post(native.ALLREDUCE, f"staged.{step}", [array.view(array)], op=native.OP_ADASUM).wait()
            ready.wait()

        def capture():
            ready.wait()
            with fake_cuda().capture(captured):
                ready.wait()
                ready.wait()

        thread = threading.Thread(target=_reporting(capture, failures := []))
        thread.start()
        world.run(call)
        thread.join()
    assert not failures


def _reporting(run, failures):
    def call():
        try:
            run()
        except BaseException as error:
            failures.append(error)
    return call


class _CuPy(types.ModuleType):
    """The part of CuPy that bagua_hvd uses, with its rule: a kernel belongs to the device of its first use."""

    class Device:
        current = [0]
        compute_capability = "90"

        def __init__(self, index):
            self.index = index

        def __enter__(self):
            self.current.append(self.index)

        def __exit__(self, *error):
            self.current.pop()

    class Module:
        def load(self, code):
            assert code == b"code"

        def get_function(self, name):
            with fake_cuda().current(_CuPy.Device.current[-1]):
                return types.SimpleNamespace(ptr=emulation().handle(name))

    def __init__(self):
        super().__init__("cupy")
        self.compiled = 0
        self.cuda = types.SimpleNamespace(
            Device=self.Device, Module=self.Module, nvrtc=types.SimpleNamespace(getVersion=lambda: (12, 9)),
            compiler=types.SimpleNamespace(compile_using_nvrtc=self._compile))

    def _compile(self, source, options, filename):
        self.compiled += 1
        return b"code", {}


def test_kernels_belong_to_the_gpu_of_the_tensor(monkeypatch, tmp_path):
    """Also if the thread's current device is another one, because torch.cuda.set_device was not called."""
    monkeypatch.setitem(sys.modules, "cupy", _CuPy())
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    devices = [open_device(index) for index in (3, 4)]
    for one in devices:
        kernels = Kernels(one.index)
        one.set_kernels({name: kernels.handle(name) for name in KERNELS}, kernels)
    at = [FakePlacement(one) for one in devices]
    with World(2, "shm") as world:
        def call(rank, context):
            array = at[rank].array(np.full(100, rank + 1.0, np.float32))
            context.post(native.ALLREDUCE, "mean", [array.view(array)], op=native.OP_AVERAGE).wait()
            return array.numpy()

        for values in world.run(call):
            np.testing.assert_array_equal(values, np.full(100, 1.5))


def test_kernels_are_compiled_once_for_a_host(monkeypatch, tmp_path):
    """One rank of a host compiles, and the others load the result if the folder for it is writable."""
    monkeypatch.setitem(sys.modules, "cupy", cupy := _CuPy())
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kept"))
    ranks = [threading.Thread(target=Kernels, args=(0,)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert cupy.compiled == 1
    assert len(list((tmp_path / "kept").glob("*.cubin"))) == 1
    monkeypatch.setenv("CUPY_CACHE_DIR", "/dev/null/no folder")
    for _ in range(2):
        Kernels(0)
    assert cupy.compiled == 3


def test_a_whole_model_needs_little_pinned_memory():
    """Broadcast tensor by tensor: operations posted before the ranks agree on NCCL are staged."""
    count, size = 40, 1 << 20
    at = placements(2)
    before = fake_cuda().pinned_bytes()
    with World(2, "shm") as world:
        def call(rank, context):
            arrays = [at[rank].array(np.full(size // 4, rank + i, np.float32)) for i in range(count)]

            def start(one):
                i, array = one
                return context.post(native.BROADCAST, f"x.{i}", [array.view(array)])

            in_window(enumerate(arrays), start, lambda operation: operation.wait(), lambda one: size, limit=4 * size)
            return [array.numpy()[7] for array in arrays]

        for values in world.run(call):
            assert values == list(range(count))
    assert fake_cuda().pinned_bytes() - before < 2 * 12 * 2 * size      # two ranks; buffers are powers of two


def test_operations_that_wait_for_the_gpu_are_not_asked_for_one_by_one():
    """Their copies to the host complete in order: while the first is pending, none is queried."""
    count = 50
    with World(1, "inproc") as world:
        def call(rank, context):
            placement = FakePlacement(open_device(0, nccl=False))     # without buffers of other tests
            arrays = [placement.array(np.ones(100, np.float32)) for _ in range(count)]
            release, before = fake_cuda().hold(placement.current), fake_cuda().asked()
            posted = [context.post(native.ALLREDUCE, f"x.{i}", [x.view(x)]) for i, x in enumerate(arrays)]
            for step in range(5):
                context.post(native.BARRIER, f"step.{step}").wait()
            asked = fake_cuda().asked() - before
            release()
            for operation in posted:
                operation.wait()
            return asked

        assert world.run(call)[0] < count // 2


def test_a_window_of_operations():
    events = []

    def start(x):
        events.append(f"start {x}")
        return x

    in_window([5, 3, 4, 20, 1], start, lambda x: events.append(f"finish {x}"), int, limit=8)
    assert events == ["start 5", "start 3", "finish 5", "start 4", "finish 3", "finish 4", "start 20", "finish 20",
                      "start 1", "finish 1"]
