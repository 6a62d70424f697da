"""Capabilities of this installation: the text of `baguarun --check-build`."""
import importlib
import importlib.util
import os
import shutil
import sys
from contextlib import contextmanager

from bagua_hvd.core.version import __version__

_FRAMEWORKS = (("TensorFlow", "tensorflow"), ("PyTorch", "torch"))
# In rising order, under the names of bhvd_cpu_features: a CPU with one feature has all before it.
_CPU_FEATURES = ("scalar", "avx2", "avx512")


def _line(available, name, note=""):
    return f"    [{'X' if available else ' '}] {name}" + (f"  ({note})" if note else "")


@contextmanager
def _quiet():
    """Discards all output to descriptor 2, from any language."""
    sys.stderr.flush()
    with open(os.devnull, "wb") as nowhere:
        stderr = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)


def _framework(name, module):
    if importlib.util.find_spec(module) is None:
        return _line(False, name, "not installed")
    # Reports the error of a broken installation, without the framework's own messages at import.
    try:
        with _quiet():
            importlib.import_module(module)
    except Exception as error:
        return _line(False, name, f"import {module} fails: {error}")
    return _line(True, name)


def _native():
    """(the cffi library or None, why it is None)."""
    try:
        from bagua_hvd._native import lib
    except ImportError as error:
        return None, f"not built: run `pip install .` in the source folder of bagua_hvd; {error}"
    return lib, ""


def _starters():
    """The programs in PATH that baguarun uses to start ranks, and those that start ranks themselves."""
    lines = [_line(True, "baguarun on this host")]
    for name, program in (("baguarun on other hosts, by ssh", "ssh"), ("mpirun", "mpirun"), ("srun", "srun"),
                          ("torchrun", "torchrun")):
        path = shutil.which(program)
        lines.append(_line(path is not None, name, path or f"no {program} in PATH"))
    return lines


def _version(number, major, minor):
    return f"{number // major}.{number % major // minor}"


def _operations(built):
    """Horovod's names of the libraries that move tensors."""
    if not built:
        return [_line(False, name) for name in ("NCCL", "DDL", "CCL", "MPI", "Gloo")]
    from bagua_hvd.job import runtime

    available = {"NCCL": runtime.nccl_built(), "DDL": runtime.ddl_built(), "CCL": runtime.ccl_built(), "MPI": True,
                 "Gloo": True}
    return [_line(found, name) for name, found in available.items()]


def _gpus(built):
    """The parts of CUDA on this host: driver and NCCL are loaded at run time, CuPy compiles the kernels."""
    if not built:
        return [_line(False, "CUDA", "needs the native extension")]
    from bagua_hvd.core import device

    version, count, missing = device.cuda_facts()
    lines = [_line(count > 0, "CUDA", missing or f"driver of CUDA {_version(version, 1000, 10)}, {count} GPUs")]
    version, missing = device.nccl_facts()
    lines.append(_line(not missing, "NCCL", missing or f"{_version(version, 10000, 100)} found"))
    found = importlib.util.find_spec("cupy") is not None
    lines.append(_line(found, "CuPy", "" if found else "not installed: without it kernels are replaced by copies"))
    return lines


def check_build() -> str:
    """The text, in several lines. Imports the installed frameworks, so it may take seconds."""
    lib, reason = _native()
    built = lib is not None
    lines = [f"bagua_hvd v{__version__}:", "", "Available Frameworks:"]
    lines += [_framework(*framework) for framework in _FRAMEWORKS]
    lines += ["", "Native Extension:", _line(built, "bagua_hvd._native", reason)]
    lines += ["", "Available Controllers:", _line(built, "MPI", "that of mpirun, found at run time"),
              _line(built, "Gloo", "the built-in one")]
    lines += ["", "Available Tensor Operations:", *_operations(built)]
    lines += ["", "Available Transports:"] + [_line(built, name) for name in ("inproc", "shm", "tcp", "mpi")]
    lines += ["", "Ways to Start Ranks:", *_starters(), "", "GPUs:", *_gpus(built), "", "CPU Features:"]
    if built:
        from bagua_hvd._native import ffi

        best = ffi.string(lib.bhvd_cpu_features()).decode()
        names = _CPU_FEATURES if best in _CPU_FEATURES else (best,)
        lines += [_line(names.index(name) <= names.index(best), name) for name in names]
    else:
        lines.append(_line(False, "unknown"))
    return "\n".join(lines)
