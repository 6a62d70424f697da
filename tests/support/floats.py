"""Floating dtypes in NumPy: values as float32 (float64: float64), and as stored in the core's memory."""
import numpy as np

from world import bfloat16_bits, from_bits

FLOATS = ["float16", "bfloat16", "float32", "float64"]


def wide(dtype):
    """The type in which values of the dtype are summed."""
    return np.float64 if dtype == "float64" else np.float32


def store(dtype, values):
    """Values rounded to the dtype, as in memory."""
    return bfloat16_bits(values) if dtype == "bfloat16" else np.ascontiguousarray(values).astype(dtype)


def load(dtype, stored):
    """Stored elements as exact wide values."""
    return from_bits(stored) if dtype == "bfloat16" else stored.astype(wide(dtype))


def unaligned(stored):
    """The same elements at an odd address."""
    memory = np.empty(stored.nbytes + 1, np.uint8)
    moved = np.frombuffer(memory.data, stored.dtype, stored.size, offset=1)
    moved[:] = stored
    return moved


def assert_same_bits(actual, expected, what=""):
    """Equal bit for bit, except that all NaNs are equal."""
    bits = f"u{actual.dtype.itemsize}"
    same = actual.view(bits) == expected.view(bits)
    if actual.dtype.kind == "f":
        same |= np.isnan(actual) & np.isnan(expected)
    where = np.flatnonzero(~same)[:5]
    assert actual.dtype == expected.dtype and same.all(), (what, where, actual[where], expected[where])
