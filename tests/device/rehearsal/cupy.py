"""A fake of CuPy for `gpu_check.sh --rehearse`: the functions of core.device, test_kernels, tests.laboratory.device.

Arrays are NumPy's and kernels run on the CPU (tests/support/ptx.py); times are the host's and mean nothing.
"""
import ctypes
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from numpy import float32, uint8  # noqa: F401  (of CuPy's interface)

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

import device_arrays  # noqa: E402

__version__ = "rehearsed"


class ndarray(np.ndarray):  # noqa: N801  (CuPy's name)
    def get(self):
        return np.asarray(self).copy()

    def set(self, values):
        self[...] = values

    @property
    def data(self):
        at = self.ctypes.data
        return SimpleNamespace(ptr=at, copy_from_device_async=lambda source, nbytes, stream: ctypes.memmove(
            at, source.ptr, nbytes))


def zeros(shape, dtype):
    return np.zeros(shape, dtype).view(ndarray)


def asarray(values):
    return np.ascontiguousarray(values).view(ndarray)


class _Generator:
    def __init__(self, seed):
        self._generator = np.random.default_rng(seed)

    def standard_normal(self, count, dtype):
        return self._generator.standard_normal(count, dtype).view(ndarray)


random = SimpleNamespace(default_rng=_Generator)


class _Event:
    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass


class _Device:
    compute_capability = "90"

    def __init__(self, index):
        self._index = index

    def __enter__(self):
        self._current = device_arrays.fake_cuda().current(self._index)
        self._current.__enter__()

    def __exit__(self, *error):
        self._current.__exit__(*error)


class _Function:
    def __init__(self, name):
        self._name = name
        self.ptr = device_arrays.emulation().handle(name)

    def __call__(self, grid, block, arguments):
        words = [float(word) if isinstance(word, np.floating) else int(word) for word in arguments]
        device_arrays.emulation().launch(self._name, grid[0], block[0], *words, everywhere=True)


class _Module:
    def load(self, code):
        pass

    def get_function(self, name):
        return _Function(name)


cuda = SimpleNamespace(
    Device=_Device, Event=_Event, Module=_Module, get_current_stream=lambda: None,
    get_elapsed_time=lambda begin, end: 1000 * (end.at - begin.at),
    compiler=SimpleNamespace(compile_using_nvrtc=lambda source, options, filename: (b"", {})),
    nvrtc=SimpleNamespace(getVersion=lambda: "rehearsed"),
    runtime=SimpleNamespace(getDeviceProperties=lambda index: {"name": b"no GPU: a rehearsal"},
                            driverGetVersion=lambda: device_arrays.device.cuda_facts()[0]))
