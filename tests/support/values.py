"""The ranks' inputs of a reduction, and the expected results from NumPy."""
import numpy as np

from bagua_hvd.core import native
from world import bfloat16_bits, from_bits, storage

OPS = {native.OP_SUM: np.add, native.OP_MIN: np.minimum, native.OP_MAX: np.maximum, native.OP_PRODUCT: np.multiply}
LOGICAL = {native.OP_SUM: np.logical_or, native.OP_MAX: np.logical_or,
           native.OP_MIN: np.logical_and, native.OP_PRODUCT: np.logical_and}


def make(dtype, count, rank, n):
    """Values that differ between ranks, so small that every dtype holds sums and products of 8 ranks exactly."""
    i = np.arange(count)
    if dtype == "bool":
        return (i + rank) % 3 == 0
    values = (i * 7 + rank * 3) % 5 if n <= 3 else (i + rank) % 2
    if dtype == "bfloat16":
        return bfloat16_bits(values)
    return values.astype(dtype)


def reduced(dtype, op, inputs):
    if dtype == "bool":
        return np.logical_or.reduce(inputs) if LOGICAL[op] is np.logical_or else np.logical_and.reduce(inputs)
    if dtype == "bfloat16":
        return bfloat16_bits(OPS[op].reduce([from_bits(x) for x in inputs]))
    total = inputs[0]
    for x in inputs[1:]:
        total = OPS[op](total, x)
    return total.astype(storage(dtype))
