"""Arrays in the memory of a fake GPU (tests/device/fake_cuda.c), like those of a framework.

They test everything between a framework's tensors and the CPU transports. No GPU is involved, so nothing here measures
speed.
"""
import ctypes
import functools
import hashlib
import itertools
import math
import os
import shutil
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import nvrtc
import ptx
from bagua_hvd.collectives.frontend import Frontend
from bagua_hvd.core import device, native
from bagua_hvd.core.device import KERNELS, Device, Placement
from bagua_hvd.core.exceptions import HorovodInternalError
from locks import locked
from world import DTYPES, storage

ROOT = Path(__file__).parents[2]
HERE = ROOT / "tests" / "device"
BUILT = ROOT / "build" / "device-tests"
DEVICES = 8                 # of the fake, as in fake_cuda.c
_HOST_SOURCES = [HERE / "fake_cuda.c", HERE / "fake_nccl.c"]


def run_compiler(command, output):
    """Writes `output` atomically."""
    unfinished = output.with_suffix(".unfinished")
    done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    unfinished.rename(output)


@functools.cache
def fake_cuda_path():
    """One library with fakes of libcuda.so.1 and libnccl.so.2."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    command = [compiler, "-O1", "-g", "-Wall", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off",
               f"-I{ROOT / 'native'}", *map(str, _HOST_SOURCES), "-pthread", "-lm"]
    output = BUILT / "fake_cuda.so"
    with locked(BUILT):
        changed = max(path.stat().st_mtime for path in [*_HOST_SOURCES, HERE / "fake_cuda.h"])
        if not output.exists() or changed > output.stat().st_mtime:
            run_compiler(command, output)
    return str(output)


class FakeCuda:
    """The fake's own functions, for tests: memory, streams, and calls that a framework would make."""

    def __init__(self):
        self.handle = ctypes.CDLL(fake_cuda_path())
        for name in ("launches", "link_bytes", "pinned_bytes", "asked"):
            getattr(self.handle, f"fake_cuda_{name}").restype = ctypes.c_uint64
        self.handle.fake_cuda_kernel.restype = ctypes.c_void_p
        self._check(self.handle.cuInit(0))

    @staticmethod
    def _check(code):
        assert code == 0, f"the fake driver returned {code}"

    @contextmanager
    def current(self, index):
        """Makes the context of this GPU the thread's current one."""
        context = ctypes.c_void_p()
        self._check(self.handle.cuDevicePrimaryCtxRetain(ctypes.byref(context), index))
        self._check(self.handle.cuCtxPushCurrent_v2(context))
        try:
            yield
        finally:
            self._check(self.handle.cuCtxPopCurrent_v2(ctypes.byref(context)))

    def allocate(self, nbytes, index=0):
        out = ctypes.c_void_p()
        with self.current(index):
            self._check(self.handle.cuMemAlloc_v2(ctypes.byref(out), ctypes.c_size_t(nbytes or 1)))
        return out.value

    def stream(self, index=0):
        out = ctypes.c_void_p()
        with self.current(index):
            self._check(self.handle.cuStreamCreate(ctypes.byref(out), 0))
        return out.value

    def kernel(self, function):
        """The handle of a struct fake_function in the current context, or that of GPU 0."""
        return self.handle.fake_cuda_kernel(ctypes.c_void_p(function))

    def copy(self, dst, src, nbytes, stream):
        """Enqueued on the stream; host memory must stay valid until it is synchronized."""
        self._check(self.handle.cuMemcpyAsync(ctypes.c_void_p(dst), ctypes.c_void_p(src), ctypes.c_size_t(nbytes),
                                               ctypes.c_void_p(stream)))

    def synchronize(self, stream):
        self._check(self.handle.cuStreamSynchronize(ctypes.c_void_p(stream)))

    def copies(self):
        return self.handle.fake_cuda_copies()

    def launches(self):
        return self.handle.fake_cuda_launches()

    def link_bytes(self):
        """Total size of the requested copies between host and devices."""
        return self.handle.fake_cuda_link_bytes()

    def asked(self):
        """Approximate number of event records that have been queried for completion."""
        return self.handle.fake_cuda_asked()

    def pinned_bytes(self):
        """Size of the currently pinned memory."""
        return self.handle.fake_cuda_pinned_bytes()

    def nccl_groups(self):
        """Number of groups that the fake NCCL has launched in this process."""
        return self.handle.fake_nccl_groups()

    @contextmanager
    def devices(self, count):
        """Sets the number of GPUs to `count` instead of DEVICES."""
        self.handle.fake_cuda_set_devices(count)
        try:
            yield
        finally:
            self.handle.fake_cuda_set_devices(DEVICES)

    def hold(self, stream):
        """Blocks the stream until the returned function is called."""
        event = ctypes.c_void_p()
        with self.current(0):
            self._check(self.handle.cuEventCreate(ctypes.byref(event), 2))
        self.handle.fake_cuda_hold(ctypes.c_void_p(stream), event)
        elsewhere = self.stream()
        return lambda: self._check(self.handle.cuEventRecord(event, ctypes.c_void_p(elsewhere)))

    @contextmanager
    def capture(self, stream):
        """Captures a graph from the stream in global mode, the default. Afterwards it must be valid."""
        self.handle.fake_cuda_begin_capture(ctypes.c_void_p(stream))
        try:
            yield
        finally:
            code = self.handle.fake_cuda_end_capture(ctypes.c_void_p(stream))
        self._check(code)


@functools.cache
def fake_cuda():
    return FakeCuda()


def open_device(index, nccl=True):
    """A Device of the fake driver that is used nowhere else; `nccl`: with the fake NCCL."""
    names = ("BAGUA_HVD_LIBCUDA", "BAGUA_HVD_LIBNCCL")
    with mock.patch.dict(os.environ, dict.fromkeys(names, fake_cuda_path()), BAGUA_HVD_NCCL=str(int(nccl))):
        return Device(index)


@functools.cache
def fake_device():
    """A GPU shared by all ranks, without NCCL."""
    return open_device(0, nccl=False)


@functools.cache
def own_device(index, kernels=True):
    """A rank's own GPU, with NCCL; `kernels`: with kernels that run on the CPU."""
    device = open_device(index)
    return _with_kernels(device) if kernels else device


def _with_kernels(device):
    kernels = emulation()
    with fake_cuda().current(device.index):
        device.set_kernels({name: kernels.handle(name) for name in KERNELS}, kernels)
    return device


@functools.cache
def fake_device_with_kernels():
    """A GPU shared by all ranks, without NCCL, with kernels that run on the CPU."""
    return _with_kernels(open_device(0, nccl=False))


def fake_devices_with_kernels_but_one(n):
    """One device for each rank, like fake_device_with_kernels; the last rank's has no kernels."""
    return [fake_device_with_kernels()] * (n - 1) + [open_device(0, nccl=False)]


class FakePlacement(Placement):
    """A rank's tensors on the fake GPU, with the framework's own stream. device: None: the shared one."""

    def __init__(self, device=None):
        super().__init__(device or fake_device())
        self.cuda = fake_cuda()
        self.current = self.cuda.stream(self.device.index)
        self._alive = []                # memory that the stream still reads

    def stream(self):
        return self.current

    def adopt(self, array):
        return self.array(array)

    def array(self, values, dtype=None):
        """A DeviceArray with these values, copied in stream order, like a kernel's results."""
        values = np.ascontiguousarray(values)
        array = self.empty(values.shape, dtype or values.dtype.name)
        self._alive.append(values)
        if values.nbytes:
            self.cuda.copy(array.address, values.ctypes.data, values.nbytes, self.current)
        return array

    def empty(self, shape, dtype):
        nbytes = math.prod(shape) * storage(dtype).itemsize
        return DeviceArray(self, self.cuda.allocate(nbytes, self.device.index), tuple(shape), dtype)


def sums_overwritten_in_flight(placement, rank, context, steps):
    """Allreduces of rank + step, written just before, and read and overwritten just after, without synchronization."""
    current, posted, copies = placement.current, [], []
    for step in range(steps):
        array = placement.array(np.full(5000, rank + step, np.float32))
        posted.append((array, context.post(native.ALLREDUCE, f"step.{step}", [array.view(array)])))
    for array, operation in posted:
        operation.wait()
        copy = placement.empty(array.shape, "float32")
        placement.cuda.copy(copy.address, array.address, 20000, current)
        placement.cuda.copy(array.address, placement.array(np.zeros(5000, np.float32)).address, 20000, current)
        copies.append(copy)
    return [copy.numpy() for copy in copies]


def nccl_steps(steps, dying=None):
    """The program of a rank with its own GPU: allreduces; rank `dying` is killed before the third one."""
    import bagua_hvd.torch as hvd

    hvd.init()
    placement = FakePlacement(own_device(0))
    context = hvd.mpi_ops.basics.context()
    array = placement.array(np.ones(20_000, np.float32))
    try:
        for step in range(steps):
            if step == 2 and hvd.rank() == dying:
                os.kill(os.getpid(), signal.SIGKILL)
            context.post(native.ALLREDUCE, f"step.{step}", [array.view(array)], op=native.OP_AVERAGE).wait()
        print("mean", array.numpy().mean(), fake_cuda().nccl_groups())
    except HorovodInternalError as error:
        placement.cuda.synchronize(placement.current)       # no stream may hang afterwards
        print("failed:", error)


class DeviceArray:
    def __init__(self, placement, address, shape, dtype):
        self.placement, self.address, self.shape, self.dtype = placement, address, shape, dtype

    def numpy(self):
        """The values, copied in stream order."""
        out = np.empty(self.shape, storage(self.dtype))
        if out.nbytes:
            self.placement.cuda.copy(out.ctypes.data, self.address, out.nbytes, self.placement.current)
        self.placement.cuda.synchronize(self.placement.current)
        return out

    def view(self, output=None):
        """Like Frontend.view."""
        dst = 0 if output is None else output.address
        return native.TensorView(self.address, dst, self.shape, DTYPES[self.dtype], (self, output), self.placement)


_NAMES = {code: name for name, code in DTYPES.items()}


class DeviceFrontend(Frontend):
    """A framework that has only DeviceArrays."""

    name = "stand-in"
    reducible = frozenset(DTYPES.values())

    def __init__(self, placement):
        self.placement = placement

    def view(self, tensor, output=None):
        return tensor.view(output)

    def allocate_like(self, tensor, dim0=None):
        shape = tensor.shape if dim0 is None else (dim0, *tensor.shape[1:])
        return self.placement.empty(shape, tensor.dtype)

    def wrap_result(self, nbytes, shape, dtype, owner):
        data = bytes(native.buffer(owner, nbytes)) if nbytes else b""
        return np.frombuffer(data, storage(_NAMES[dtype])).reshape(shape)

    def int32_tensor(self, values, like=None):
        return np.array(values, np.int32)

    def splits(self, splits):
        return list(splits)

    def shape(self, tensor):
        return tensor.shape

    def type_name(self, tensor):
        return f"stand-in {tensor.dtype}"


class _Function(ctypes.Structure):
    """struct fake_function."""

    _fields_ = [("run", ctypes.c_void_p), ("param_count", ctypes.c_int)]


class Emulation:
    """native/device/kernels.cu, compiled by NVRTC and run on the CPU (ptx.py).

    Args:
        source: other CUDA code.
        counts: whether instructions and memory accesses are counted.
        edit: a function that changes the PTX.
    """

    def __init__(self, source=None, counts=False, edit=None):
        compiler = shutil.which("gcc") or shutil.which("cc")
        if nvrtc.library() is None:
            pytest.skip("no NVRTC: install nvidia-cuda-nvrtc-cu12")
        command = [compiler, "-O1", "-w", "-shared", "-fPIC", "-fvisibility=hidden", "-fwrapv", "-ffp-contract=off",
                   "-U_FORTIFY_SOURCE", *(["-DPTX_COUNTS"] if counts else [])]
        self.source = source = source or device.SOURCE.read_text()
        edited = [edit(nvrtc.compiled(source, "compute_90").ptx)] if edit else []
        parts = (source, ptx.RUNTIME.read_text(), Path(ptx.__file__).read_text(), *command, *edited)
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        self.path = BUILT / f"kernels-{digest}.so"
        with locked(BUILT):
            if not self.path.exists():
                code = self.path.with_suffix(".c")
                code.write_text(ptx.translate(edited[0] if edit else nvrtc.compiled(source, "compute_90").ptx))
                run_compiler([*command, str(code), "-lm"], self.path)
                code.unlink()
        self._library = ctypes.CDLL(str(self.path))
        self._library.ptx_launch.restype = ctypes.c_char_p

    def handle(self, name):
        """The fake driver's CUfunction, in the current context."""
        return fake_cuda().kernel(ctypes.addressof(self._function(name)))

    def _function(self, name):
        return _Function.in_dll(self._library, f"emulate_{name}")

    def launch(self, name, blocks, threads, *arguments, reachable=(), everywhere=False):
        """Runs a kernel on this thread; raises AssertionError where it would fail on a GPU.

        Args:
            arguments: arrays, ints (uint64_t) and floats (double).
            reachable: further arrays that the kernel may access.
            everywhere: it may access all memory, and global memory is not checked for races.
        """
        function = self._function(name)
        assert function.param_count == len(arguments)
        words = [ctypes.c_double(a) if isinstance(a, float)
                 else ctypes.c_uint64(a if isinstance(a, int) else a.ctypes.data) for a in arguments]
        arrays = [a for a in (*arguments, *reachable) if isinstance(a, np.ndarray)]
        ranges = [(0, 1 << 63)] if everywhere else [(a.ctypes.data, a.ctypes.data + a.nbytes) for a in arrays]
        ranges = np.array(ranges, np.uint64)
        fault = self._library.ptx_launch(
            ctypes.byref(function), blocks, threads, (ctypes.c_void_p * len(words))(*map(ctypes.addressof, words)),
            ctypes.c_void_p(ranges.ctypes.data), ctypes.c_size_t(len(ranges)), int(not everywhere))
        assert fault is None, fault.decode()

    def counts(self):
        """Counts since the last call: a dict with the fields of struct counts (ptx_runtime.h)."""
        self._library.ptx_counts.restype = _Counts
        counts = self._library.ptx_counts()
        return {name: getattr(counts, name) for name, _ in _Counts._fields_}


class _Counts(ctypes.Structure):
    """struct counts."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("instructions", "bytes_read", "bytes_written", "sectors_read",
                                                     "sectors_written", "requests")]


@functools.cache
def emulation():
    return Emulation()


@functools.cache
def missing_kernels():
    """The reason why kernels cannot run on a GPU here; "" if they can."""
    _, count, reason = device.cuda_facts()
    if not count:
        return f"no GPU: {reason or 'the driver finds none'}"
    return "" if device.cupy_is_installed() else "no CuPy to compile kernels"


def missing_gpu():
    """The reason why tests of tensors on a real GPU cannot run here; "" if they can."""
    return missing_kernels() or ("" if torch.cuda.is_available() else "this PyTorch has no CUDA")


# Marks an address of host memory as one of the device; see fake_cuda.c.
TAG = 1 << 62

names = itertools.count()
