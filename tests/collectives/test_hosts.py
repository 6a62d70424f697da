"""Collectives over several hosts, simulated by host ids: real shared memory within each, real sockets between them."""
import itertools
import os

import numpy as np
import pytest

from bagua_hvd.common import native
from values import make, reduced
from world import DTYPES, World, view

# Which host each rank is on: equal and unequal hosts, ranks in order and dealt in turn.
HOSTS = ["AB", "AAB", "AABB", "ABAB", "AABBB", "ABBBB", "AABBCC", "ABCABCA", "AAAABBBB"]
PATHS = ["", "ring", "doubling", "halving", "hierarchical"]
# Nothing, less than one element for each shard, sizes that divide nothing, and several segments.
COUNTS = [0, 1, 3, 1000, 65_537]
LARGE = 1_000_003

_names = itertools.count()
_boot = os.urandom(4).hex()


def name_for_all():
    return f"hosts.{next(_names)}"


@pytest.fixture(scope="module", params=itertools.product(HOSTS, PATHS), ids=lambda p: f"{p[0]}-{p[1] or 'chosen'}")
def world(request):
    hosts, path = request.param
    with World(len(hosts), "auto", path, hosts=[f"{_boot}.{host}" for host in hosts]) as w:
        yield w


def check_allreduce(world, dtype, count, op, offset=0):
    inputs = [make(dtype, count, rank, world.n) for rank in range(world.n)]
    expected = reduced(dtype, op, inputs)
    name = name_for_all()

    def call(rank, context):
        # `offset` bytes past the beginning: no alignment.
        memory = np.zeros(inputs[rank].nbytes + offset, np.uint8)
        array = np.frombuffer(memory.data, inputs[rank].dtype, count, offset) if count else inputs[rank].copy()
        array[:] = inputs[rank]
        out = np.empty_like(array)
        context.post(native.ALLREDUCE, name, [view(array, dtype, out)], op=op, blocking=True).wait()
        np.testing.assert_array_equal(array, inputs[rank])
        context.post(native.ALLREDUCE, name, [view(array, dtype, "in place")], op=op).wait()
        return out, array

    for out, in_place in world.run(call):
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(in_place, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums(world, dtype):
    for count in COUNTS:
        check_allreduce(world, dtype, count, native.OP_SUM)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("op", [native.OP_MIN, native.OP_MAX, native.OP_PRODUCT])
def test_other_reductions(world, dtype, op):
    for count in COUNTS:
        check_allreduce(world, dtype, count, op)


def test_large_and_unaligned(world):
    check_allreduce(world, "float32", LARGE, native.OP_SUM, offset=4)
    check_allreduce(world, "float64", 65_537, native.OP_SUM, offset=1)
