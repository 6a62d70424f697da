"""Shared by tests of compressed operations on a device: codecs, shapes, values, and the comparison of results."""
import numpy as np
import pytest

from low_precision import CODECS
from values import make

WORLDS = pytest.mark.parametrize("n, transport", [(1, "inproc"), (2, "tcp"), (3, "shm"), (4, "shm")])
# Codecs with kernels for the GPU.
CODED = [codec for codec in CODECS
         if codec.rotates or codec.name in ("minmax_uint8", "sign", "sign_rms")]
SHAPES = [(3, 5), (0,), (1,), (1201,)]


def values(dtype, shapes, rank, n, step=0):
    rng = np.random.default_rng([rank, n, step])
    if dtype in ("float32", "float64", "float16"):
        return [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    return [make(dtype, int(np.prod(shape)), rank + step, n).reshape(shape) for shape in shapes]


def assert_equal(outcomes):
    """Every rank's outcome is pairs of arrays that are equal bit for bit."""
    for results in outcomes:
        for got, expected in results:
            np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))
