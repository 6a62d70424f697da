"""GPUs: where the vendor's libraries are, opened devices with their kernels, and tensors in their memory.

Importing this needs nothing of CUDA. The driver is loaded with the first tensor on a GPU, and NCCL at its first use.
Both belong to the whole process, so devices opened here stay open. The kernels of native/device/kernels.cu are compiled
for this machine's GPU by NVRTC, through CuPy; without CuPy the core falls back to plain copies.
"""
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bagua_hvd.core import native, operations, variables
from bagua_hvd.core.log import logger
from bagua_hvd.core.native import TensorView, ffi, lib

SOURCE = Path(__file__).with_name("device_kernels.cu")

# -fmad=false: a fused multiply-add would make the GPU and the CPU differ in the last bit.
OPTIONS = ("-std=c++17", "--fmad=false")
# Compiles on all processors; the generated code is the same.
IN_PARALLEL = ("--split-compile=0",)
TYPES = ("f32", "f64", "f16", "bf16")
_FAMILIES = {number: name.removeprefix("BHVD_DEVICE_").lower()
             for number, name in ffi.typeof("bhvd_device_kernel").elements.items()
             if number < lib.BHVD_DEVICE_KERNEL_COUNT}
# The kernels that the core launches, by their names in kernels.cu: (kernel, type) of bhvd_device_set_kernel.
KERNELS = {"copy_spans": (lib.BHVD_DEVICE_COPY_SPANS, 0),
           **{f"{family}_{type}": (number, i) for number, family in _FAMILIES.items() if family != "copy_spans"
              for i, type in enumerate(TYPES)}}

_devices: dict = {}
_lock = threading.Lock()


def driver_files() -> Any:
    """Files to try for libcuda.so.1 before the system's folders, separated by ':'."""
    return variables.read("BAGUA_HVD_LIBCUDA") or ""


def nccl_is_wanted() -> bool:
    """Whether NCCL may move tensors of GPUs, at least within hosts: unless BAGUA_HVD_NCCL is 0 on any rank."""
    return variables.read("BAGUA_HVD_NCCL") != "0"


def nccl_files() -> Any:
    """Files to try for libnccl.so.2: BAGUA_HVD_LIBNCCL, then the package nvidia-nccl-cu12 or -cu13."""
    files = [variables.read("BAGUA_HVD_LIBNCCL")]
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        files.append(str(Path(folder) / "lib" / "libnccl.so.2"))
    return ":".join(filter(None, files))


def cuda_facts() -> Any:
    """(version, GPUs, reason): version is 12040 for CUDA 12.4; reason says why there is no driver, "" if there is."""
    version, count, error = ffi.new("int *"), ffi.new("int *"), ffi.new("struct bhvd_error *")
    status = lib.bhvd_cuda_probe(driver_files().encode(), version, count, error)
    return version[0], count[0], "" if status == native.OK else native.failure_of(error).message


def nccl_facts() -> Any:
    """(version, reason): version is 22105 for NCCL 2.21.5; reason says why there is no NCCL, "" if there is."""
    version, error = ffi.new("int *"), ffi.new("struct bhvd_error *")
    status = lib.bhvd_nccl_probe(nccl_files().encode(), version, error)
    return (version[0], "") if status == native.OK else (0, native.failure_of(error).message)


class Device:
    """An opened GPU.

    Args:
        index: the GPU, as the framework counts them.
    Attributes:
        to_host, from_host: addresses of the streams that read and write the tensors of operations.
    Raises:
        HorovodInternalError: no driver, or it failed; ValueError: no such GPU. The message says what is missing.
    """

    def __init__(self, index: int) -> None:
        text = ffi.new("char[]", driver_files().encode())
        options = ffi.new("struct bhvd_device_options *", {"index": index, "libraries": text})
        if nccl_is_wanted():
            nccl_text = ffi.new("char[]", nccl_files().encode())
            options.nccl_libraries = nccl_text
        out = ffi.new("bhvd_device **")
        native.call(lib.bhvd_device_create, options, out)
        self.index = index
        self._pointer = out[0]
        self._module = None
        self.to_host = int(ffi.cast("uintptr_t", lib.bhvd_device_stream(self._pointer, 1)))
        self.from_host = int(ffi.cast("uintptr_t", lib.bhvd_device_stream(self._pointer, 0)))

    def set_kernels(self, functions: Any, owner: Any) -> None:
        """Gives the core kernels: a dict from names in KERNELS to the driver's handles. `owner` keeps them alive."""
        for name, function in functions.items():
            lib.bhvd_device_set_kernel(self._pointer, *KERNELS[name], ffi.cast("void *", function))
        self._module = owner

    def place(self, args: Any, stream: Any) -> None:
        """Fills in the device fields of a struct bhvd_args: index, native device and stream."""
        args.device = self.index
        args.gpu = self._pointer
        args.stream = ffi.cast("void *", stream)

    def copy(self, views: Sequence[TensorView], stream: Any) -> None:
        """Copies each view's src to its dst, host or GPU, after all earlier work of the stream. Blocks until done."""
        array, _shapes = operations.tensor_array(views)
        native.call(lib.bhvd_device_copy, self._pointer, array, len(views), ffi.cast("void *", stream))

    def wait(self, context: Any) -> None:
        """Waits for GPU work that ended operations of a context (bhvd_context *) queued; see bhvd_context_wait_gpu."""
        native.call(lib.bhvd_context_wait_gpu, context, self._pointer)


def device(index: int) -> Any:
    """The opened Device of this index, the same object every time; with its kernels if CuPy can compile them.

    If CuPy cannot, one warning says so; tensors are then copied one by one, and the CPU averages and encodes.
    """
    with _lock:
        found = _devices.get(index)
        if found is None:
            found = _devices[index] = Device(index)
            if cupy_is_installed():
                _compile_kernels(found)
    return found


def _compile_kernels(found):
    try:
        kernels = Kernels(found.index)
        found.set_kernels({name: kernels.handle(name) for name in KERNELS}, kernels)
    except Exception as error:      # whatever CuPy, NVRTC and the driver may raise
        logger.warning("tensors on GPU %d are copied one by one, averaged and encoded on the host, since CuPy cannot "
                       "compile kernels: %s", found.index, error)


def cupy_is_installed() -> bool:
    """Whether the kernels can be compiled."""
    return importlib.util.find_spec("cupy") is not None


class Kernels:
    """The compiled kernels of one GPU.

    Args:
        index: of the GPU, as the framework counts.
    Raises:
        ImportError: no CuPy. RuntimeError and other errors of CuPy: it finds no NVRTC, or no GPU.
    """

    def __init__(self, index: int) -> None:
        import cupy

        self._device = cupy.cuda.Device(index)
        with self._device:
            self._module = cupy.cuda.Module()
            self._module.load(_machine_code(self._device.compute_capability))

    def function(self, name: str) -> Any:
        """The kernel as CuPy's Function: called with (grid,), (block,), arguments."""
        with self._device:              # a kernel is loaded into the context that is current at its first use
            return self._module.get_function(name)

    def handle(self, name: str) -> Any:
        """The driver's handle of the kernel, an int; it lives as long as this object."""
        return self.function(name).ptr


def _machine_code(capability: str) -> bytes:
    """Compiles for the current GPU. This takes up to a minute, so the code is cached where CuPy caches its own
    (CUPY_CACHE_DIR), and the ranks of a host wait for the one that compiles. Without that folder each compiles.

    cupy.RawModule would add -ftz=true: numbers below 1e-38 would become 0, and the GPU's codes differ from the CPU's.
    """
    import cupy

    source = SOURCE.read_text()
    about = repr((source, OPTIONS, capability, cupy.cuda.nvrtc.getVersion()))
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")
    file = folder / f"bagua_hvd-{hashlib.sha256(about.encode()).hexdigest()[:32]}.cubin"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(file.with_suffix(".lock").open("w")), fcntl.LOCK_EX)
        with contextlib.suppress(OSError):
            return file.read_bytes()
        code, _ = cupy.cuda.compiler.compile_using_nvrtc(source, OPTIONS + IN_PARALLEL, filename="kernels.cu")
        with contextlib.suppress(OSError):
            unfinished = file.with_suffix(f".{os.uname().nodename}.{os.getpid()}")
            unfinished.write_bytes(code)
            unfinished.rename(file)
        return code


class Placement:
    """The GPU that a tensor is on, and how its framework orders work there. One for each framework and GPU."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def stream(self) -> Any:
        """The address of the framework's current stream on this GPU."""
        raise NotImplementedError

    def adopt(self, tensor: Any) -> Any:
        """A tensor on this GPU with the values of a host tensor."""
        raise NotImplementedError
