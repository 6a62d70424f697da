"""Small helpers under Horovod's path, for scripts and libraries that import them from there."""
import importlib.util
import os
import sysconfig
import warnings
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

from bagua_hvd.core.exceptions import HorovodVersionMismatchError, get_version_mismatch_message
from bagua_hvd.core.util import (  # noqa: F401
    _cache,
    get_average_backwards_compatibility_fun,
    num_rank_is_power_2,
    split_list,
)


def get_ext_suffix() -> str:
    """File name ending of extension modules, such as `.cpython-312-x86_64-linux-gnu.so`."""
    return sysconfig.get_config_var("EXT_SUFFIX") or ".so"


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Path of extension module `args` (folders, then base name) beside the file `pkg_path`."""
    return os.path.join(os.path.dirname(pkg_path), *args[:-1], args[-1] + get_ext_suffix())


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """ImportError if the native core is missing. It serves every framework; arguments only matter in the message."""
    if not _core_available():
        raise ImportError(
            f"Extension {ext_name} has not been built: the native core bagua_hvd._native is missing. "
            "Run `pip install .` in the source folder of bagua_hvd."
        )


def _core_available():
    return importlib.util.find_spec("bagua_hvd._native") is not None


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether front end `ext_base_name` ("torch", "tensorflow") can run: the core and the framework are installed."""
    available = _core_available() and importlib.util.find_spec(ext_base_name) is not None
    if verbose:
        print(f"bagua_hvd: front end {ext_base_name} is {'' if available else 'not '}available")
    return available


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether front end `ext_base_name` can use GPUs; only PyTorch's can."""
    if ext_base_name != "torch" or not _core_available():
        return False
    from bagua_hvd.core import device  # late: it needs the core

    return device.cuda_facts()[1] > 0


def _built(name):
    def built(verbose: bool = False) -> Any:
        if not _core_available():
            return None
        from bagua_hvd.job import runtime  # late: it needs the core

        return getattr(runtime, f"{name}_built")()

    built.__name__ = built.__qualname__ = f"{name}_built"
    built.__doc__ = f"What job.runtime.{name}_built() says; None when the native core is missing."
    return built


mpi_built = _built("mpi")
gloo_built = _built("gloo")
nccl_built = _built("nccl")
ddl_built = _built("ddl")
ccl_built = _built("ccl")


def check_installed_version(name: str, version: str, exception: BaseException | None = None) -> None:
    """Compares the installed framework's version with `version`; warns, or raises if `exception` is given."""
    installed = importlib.import_module(name).__version__
    if installed == version:
        return
    if exception is None:
        warnings.warn(get_version_mismatch_message(name, version, installed), stacklevel=2)
    else:
        raise HorovodVersionMismatchError(name, version, installed) from exception


@contextmanager
def env(**kwargs: Any) -> Generator[None, None, None]:
    """Sets environment variables within the block; those given as None are left unchanged."""
    saved = {}
    try:
        for name, value in kwargs.items():
            if value is not None:
                saved[name] = os.environ.get(name)
                os.environ[name] = str(value)
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def is_iterable(x: Any) -> bool:
    """Whether x can be iterated over."""
    return isinstance(x, Iterable) or hasattr(x, "__getitem__")


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Compares versions of the form x.y.z, ignoring suffixes (`.dev0`, `+cpu`). ValueError for other forms."""
    return _version(ver) >= _version(target)


def _version(text):
    if not isinstance(text, str):
        raise ValueError(f"expected a version as a string such as '2.1.0', not {text!r}")
    parts = text.split("+")[0].split(".")
    if len(parts) < 3 or not all(part.isdigit() for part in parts[:2]):
        raise ValueError(f"expected a version such as '2.1.0', not {text!r}")
    digits = parts[2][:len(parts[2]) - len(parts[2].lstrip("0123456789"))]
    if not digits:
        raise ValueError(f"expected a version such as '2.1.0', not {text!r}")
    return int(parts[0]), int(parts[1]), int(digits)
