"""The equation of D_FP_S, dst_i = sum_j W_ij x_j, and a function that posts it."""
import numpy as np

from bagua_hvd.core import native
from floats import load, store, wide

SHIFT_ONE, RING = native.TOPOLOGY_SHIFT_ONE, native.TOPOLOGY_RING
EXPONENTIAL, ROUND_ROBIN = native.TOPOLOGY_EXPONENTIAL, native.TOPOLOGY_ROUND_ROBIN


def peers(topology, n, i, round):
    """The ranks whose values are added to rank i's own, in this order."""
    if topology == RING:
        return [(i - 1) % n, (i + 1) % n] if n > 1 else []
    if topology == EXPONENTIAL:
        peer = i ^ 2 ** (round % max(1, int(np.ceil(np.log2(n)))))
        peer = peer if peer < n else i
    elif topology == ROUND_ROBIN and n % 2 == 0:        # i meets round - i; the last rank meets the one left over
        circle = {a: (round - a) % (n - 1) for a in range(n - 1)}
        left = next(a for a, b in circle.items() if a == b)
        peer = {**circle, left: n - 1, n - 1: left}[i]
    elif n % 2:
        peer = (round - i) % n
    else:
        half = n // 2
        peer = half + (round + i) % half if i < half else (i - half - round) % half
    return [peer] if peer != i else []


def averaged(topology, dtype, inputs, i, round):
    """Rank i's result."""
    others = peers(topology, len(inputs), i, round)
    total = load(dtype, inputs[i])
    if not others:
        return inputs[i]
    for j in others:
        total = total + load(dtype, inputs[j])
    return store(dtype, total * wide(dtype)(1 / (1 + len(others))))


def values(dtype, count, rank):
    return store(dtype, np.random.default_rng([count, rank]).standard_normal(count))


def post(context, name, views, topology=SHIFT_ONE, round=0, **arguments):
    return context.post(native.D_FP_S, name, views, topology=topology, round=round, **arguments)
