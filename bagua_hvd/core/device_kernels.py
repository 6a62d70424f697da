"""Compiles the kernels of native/device/kernels.cu for this machine's GPU, by NVRTC through CuPy.

Without CuPy the core falls back to plain copies.
"""
import contextlib
import fcntl
import hashlib
import importlib.util
import os
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("device_kernels.cu")

# -fmad=false: a fused multiply-add would make the GPU and the CPU differ in the last bit.
OPTIONS = ("-std=c++17", "--fmad=false")
# Compiles on all processors; the generated code is the same.
IN_PARALLEL = ("--split-compile=0",)


def available() -> bool:
    """Whether CuPy, which compiles the kernels, is installed."""
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
    (CUPY_CACHE_DIR), and the ranks of a host wait for the one that compiles. Without that folder each rank compiles.

    cupy.RawModule would add -ftz=true: numbers below 1e-38 would become 0, and the GPU's codes differ from the CPU's.
    """
    import cupy

    source = SOURCE.read_text()
    about = repr((source, OPTIONS, capability, cupy.cuda.nvrtc.getVersion()))
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")
    file = folder / f"bagua_hvd-{hashlib.sha256(about.encode()).hexdigest()[:32]}.cubin"
    with _locked(file.with_suffix(".lock")) as may_write:
        with contextlib.suppress(OSError):
            return file.read_bytes()
        code, _ = cupy.cuda.compiler.compile_using_nvrtc(source, OPTIONS + IN_PARALLEL, filename="kernels.cu")
        if may_write:
            with contextlib.suppress(OSError):
                unfinished = file.with_suffix(f".{os.getpid()}")
                unfinished.write_bytes(code)
                unfinished.rename(file)
        return code


@contextlib.contextmanager
def _locked(file: Path) -> Any:
    """Holds the file's lock, after creating its folder. Yields False if that is impossible (a read-only disk)."""
    with contextlib.ExitStack() as stack:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(file.open("w")), fcntl.LOCK_EX)
        except OSError:
            may_write = False
        else:
            may_write = True
        yield may_write
