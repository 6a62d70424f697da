"""GPUs: where the vendor's libraries lie, opened devices, and tensors that lie on them.

Nothing of CUDA is needed to import this. The driver is loaded when the first tensor on a GPU comes, and NCCL when
somebody asks for it; both are the whole process's, so what is opened here stays open.
"""
import importlib.util
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bagua_hvd.core import device_kernels, native, operations, variables
from bagua_hvd.core.log import logger
from bagua_hvd.core.native import TensorView, ffi, lib

TYPES = ("f32", "f64", "f16", "bf16")
_FAMILIES = {number: name.removeprefix("BHVD_DEVICE_").lower()
             for number, name in ffi.typeof("bhvd_device_kernel").elements.items()
             if number < lib.BHVD_DEVICE_KERNEL_COUNT}
# What the core launches, by the names in kernels.cu: what bhvd_device_set_kernel calls kernel and type.
KERNELS = {"copy_spans": (lib.BHVD_DEVICE_COPY_SPANS, 0),
           **{f"{family}_{type}": (number, i) for number, family in _FAMILIES.items() if family != "copy_spans"
              for i, type in enumerate(TYPES)}}

_devices: dict = {}
_lock = threading.Lock()


def driver_files(environ: Any = os.environ) -> Any:
    """Where to look for libcuda.so.1 before the system's places, ':' between the files."""
    return variables.read("BAGUA_HVD_LIBCUDA", environ) or ""


def nccl_is_wanted(environ: Any = os.environ) -> bool:
    """Whether NCCL may carry tensors of GPUs, at least within hosts: unless BAGUA_HVD_NCCL is 0, on any rank."""
    return variables.read("BAGUA_HVD_NCCL", environ) != "0"


def nccl_files(environ: Any = os.environ) -> Any:
    """Where to look for libnccl.so.2: BAGUA_HVD_LIBNCCL, then the package nvidia-nccl-cu12 or -cu13."""
    files = [variables.read("BAGUA_HVD_LIBNCCL", environ)]
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        files.append(str(Path(folder) / "lib" / "libnccl.so.2"))
    return ":".join(filter(None, files))


def cuda_facts() -> Any:
    """(version, GPUs, reason): the driver's version as 12040 for CUDA 12.4, and why there is none, "" when there is."""
    version, count, error = ffi.new("int *"), ffi.new("int *"), ffi.new("struct bhvd_error *")
    status = lib.bhvd_cuda_probe(driver_files().encode(), version, count, error)
    return version[0], count[0], "" if status == native.OK else native.message_of(error)


def nccl_facts() -> Any:
    """(version, reason): NCCL's version as 22105 for 2.21.5, and why there is none, "" when there is."""
    version, error = ffi.new("int *"), ffi.new("struct bhvd_error *")
    status = lib.bhvd_nccl_probe(nccl_files().encode(), version, error)
    return (version[0], "") if status == native.OK else (0, native.message_of(error))


class Device:
    """An opened GPU.

    Args:
        index: as the framework counts.
        files: where to look for the driver; None: driver_files().
        nccl: where to look for NCCL; "": it is not used; None: nccl_files(), if nccl_is_wanted().
    Attributes:
        to_host, from_host: addresses of the streams that read and write the tensors of operations.
    Raises:
        HorovodInternalError: no driver, or it failed; ValueError: no such GPU. The sentence says what is missing.
    """

    def __init__(self, index: int, files: Any = None, nccl: Any = None) -> None:
        text = ffi.new("char[]", (driver_files() if files is None else files).encode())
        options = ffi.new("struct bhvd_device_options *", {"index": index, "libraries": text})
        if nccl or (nccl is None and nccl_is_wanted()):
            nccl_text = ffi.new("char[]", (nccl or nccl_files()).encode())
            options.nccl_libraries = nccl_text
        out, error = ffi.new("bhvd_device **"), ffi.new("struct bhvd_error *")
        native.check(lib.bhvd_device_create(options, out, error), error)
        self.index = index
        self._pointer = out[0]
        self._module = None
        self.to_host = int(ffi.cast("uintptr_t", lib.bhvd_device_stream(self._pointer, 1)))
        self.from_host = int(ffi.cast("uintptr_t", lib.bhvd_device_stream(self._pointer, 0)))

    def set_kernels(self, functions: Any, owner: Any) -> None:
        """Gives the core kernels: a dict from a name in KERNELS to the driver's handle. `owner` keeps them alive."""
        for name, function in functions.items():
            lib.bhvd_device_set_kernel(self._pointer, *KERNELS[name], ffi.cast("void *", function))
        self._module = owner

    def place(self, args: Any, stream: Any) -> None:
        """Fills in where an operation's tensors are: struct bhvd_args."""
        args.device = self.index
        args.gpu = self._pointer
        args.stream = ffi.cast("void *", stream)

    def copy(self, views: Sequence[TensorView], stream: Any) -> None:
        """Copies each view's src to its dst, host or GPU, after what the stream was given before. Blocks until done."""
        array, _shapes = operations.tensor_array(views)
        error = ffi.new("struct bhvd_error *")
        native.check(lib.bhvd_device_copy(self._pointer, array, len(views), ffi.cast("void *", stream), error), error)

    def wait(self, context: Any) -> None:
        """Waits for what ended operations of a context (bhvd_context *) put on the GPU; see bhvd_context_wait_gpu."""
        error = ffi.new("struct bhvd_error *")
        native.check(lib.bhvd_context_wait_gpu(context, self._pointer, error), error)

    def close(self) -> None:
        """Gives the device back. Operations in flight hold it until they end."""
        lib.bhvd_device_drop(self._pointer)
        self._pointer = ffi.NULL


def device(index: int) -> Any:
    """The opened Device of this index, the same every time; with its kernels where CuPy is there to compile them.

    Where CuPy cannot compile, one warning says so; then tensors are copied one by one; the CPU averages and encodes.
    """
    with _lock:
        found = _devices.get(index)
        if found is None:
            found = _devices[index] = Device(index)
            if device_kernels.available():
                _compile_kernels(found)
    return found


def _compile_kernels(found):
    try:
        kernels = device_kernels.Kernels(found.index)
        found.set_kernels({name: kernels.handle(name) for name in KERNELS}, kernels)
    except Exception as error:      # whatever CuPy, NVRTC and the driver may raise
        logger.warning("tensors on GPU %d are copied one by one, averaged and encoded on the host, since CuPy cannot "
                       "compile kernels: %s", found.index, error)


class Placement:
    """On which GPU a tensor lies, and how its framework orders work there. One for each framework and GPU.

    Args:
        device: the Device.
    """

    def __init__(self, device: Any) -> None:
        self.device = device

    def stream(self) -> Any:
        """The address of the framework's current stream on this GPU."""
        raise NotImplementedError

    def adopt(self, tensor: Any) -> Any:
        """A tensor on this GPU with the values of one in the host's memory."""
        raise NotImplementedError


class DeviceView(native.TensorView):
    """A TensorView of memory on a GPU. dst_on_host: dst is the host's memory nevertheless."""

    def __new__(cls, src, dst, shape, dtype, owner, placement, dst_on_host=False):
        self = super().__new__(cls, src, dst, shape, dtype, owner)
        self.placement = placement
        self.dst_on_host = dst_on_host
        return self

    def _replace(self, **changes):
        fields = {**self._asdict(), "placement": self.placement, "dst_on_host": self.dst_on_host, **changes}
        return DeviceView(**fields)
