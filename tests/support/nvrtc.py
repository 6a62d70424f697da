"""NVRTC, which compiles CUDA C++ without a GPU, from the package nvidia-cuda-nvrtc-cu12."""
import ctypes
import functools
import glob
import importlib.util
from typing import NamedTuple

from bagua_hvd.core.device import OPTIONS


class Compiled(NamedTuple):
    ptx: str
    cubin: bytes                # for sm_*, otherwise empty


@functools.cache
def library():
    """The library, or None if it is not installed."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in glob.glob(f"{folder}/**/libnvrtc.so.*", recursive=True):
            if "alt" not in path:
                return ctypes.CDLL(path)
    return None


def knows(architecture):
    """Whether this NVRTC supports an architecture such as sm_80."""
    supported, count = (ctypes.c_int * 64)(), ctypes.c_int()
    assert library().nvrtcGetNumSupportedArchs(ctypes.byref(count)) == 0
    assert library().nvrtcGetSupportedArchs(supported) == 0
    return int(architecture[3:]) in supported[:count.value]


@functools.cache
def compiled(source, architecture):
    """Compiles for an architecture such as compute_90 or sm_90. AssertionError: NVRTC's log."""
    program = ctypes.c_void_p()
    assert library().nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None) == 0
    options = [f"--gpu-architecture={architecture}".encode(), *(option.encode() for option in OPTIONS)]
    code = library().nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    assert code == 0, _output(program, "nvrtcGetProgramLog").decode()
    cubin = _output(program, "nvrtcGetCUBIN") if architecture.startswith("sm_") else b""
    return Compiled(_output(program, "nvrtcGetPTX").rstrip(b"\0").decode(), cubin)


def _output(program, function):
    size = ctypes.c_size_t()
    assert getattr(library(), f"{function}Size")(program, ctypes.byref(size)) == 0
    data = ctypes.create_string_buffer(size.value)
    assert getattr(library(), function)(program, data) == 0
    return data.raw
