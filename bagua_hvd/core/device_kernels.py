"""Compiles the kernels of native/device/kernels.cu for the GPU that is there, by NVRTC through CuPy.

CuPy keeps what it has compiled on disk (CUPY_CACHE_DIR). Without CuPy the core copies what it has no kernel for.
"""
import importlib.util
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("device_kernels.cu")

# -fmad=false: a fused multiply-add would make the GPU and the CPU differ in the last bit.
OPTIONS = ("-std=c++17", "--fmad=false")


def available() -> bool:
    """Whether CuPy is installed, which compiles."""
    return importlib.util.find_spec("cupy") is not None


class Kernels:
    """The compiled kernels of one GPU.

    Args:
        index: of the GPU, as the framework counts.
    Raises:
        ImportError: no CuPy. RuntimeError and what else CuPy raises: it finds no NVRTC, or no GPU.
    """

    def __init__(self, index: int) -> None:
        import cupy

        self._device = cupy.cuda.Device(index)
        with self._device:
            self._module = cupy.RawModule(code=SOURCE.read_text(), options=OPTIONS)
            self._module.compile()

    def function(self, name: str) -> Any:
        """The kernel as CuPy's RawKernel: called with (grid,), (block,), arguments."""
        return self._module.get_function(name)

    def handle(self, name: str) -> Any:
        """The driver's handle of the kernel, an int; it lives as long as this object."""
        with self._device:              # in whose context CuPy loads a kernel: the current one's at its first use
            return self._module.get_function(name).kernel.ptr
