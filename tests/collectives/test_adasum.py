"""Adasum against the equation, for every power of two of ranks."""
import numpy as np
import pytest

from bagua_hvd.core import native
from bagua_hvd.core.exceptions import HorovodInternalError
from world import World, bfloat16_bits, from_bits, view


def adasum(a, b):
    ab, aa, bb = a @ b, a @ a, b @ b
    return (1 - ab / (2 * aa) if aa else 1.0) * a + (1 - ab / (2 * bb) if bb else 1.0) * b


def recursive(vectors):
    while len(vectors) > 1:
        vectors = [adasum(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def reduce_group(world, inputs, dtype, name, **options):
    """inputs[rank][tensor] -> out[rank][tensor]."""
    def call(rank, context):
        outs = [np.empty_like(x) for x in inputs[rank]]
        views = [view(x, dtype, out) for x, out in zip(inputs[rank], outs, strict=True)]
        context.post(native.ALLREDUCE, name, views, op=native.OP_ADASUM, **options).wait()
        return outs

    return world.run(call)


@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_equals_the_equation_for_each_tensor(transport, n):
    random = np.random.default_rng(n)
    with World(n, transport) as world:
        for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-5)):
            inputs = [[random.standard_normal(count).astype(dtype) for count in (1, 5, 1024, 3001)] for _ in range(n)]
            outs = reduce_group(world, inputs, dtype, f"a.{dtype}")
            for t in range(4):
                expected = recursive([inputs[rank][t].astype(np.float64) for rank in range(n)])
                for rank in range(n):
                    np.testing.assert_allclose(outs[rank][t], expected, rtol=tolerance, atol=tolerance)
                    assert outs[rank][t].tobytes() == outs[0][t].tobytes()


def test_orthogonal_adds_and_parallel_averages():
    with World(2) as world:
        x, y = np.array([1.0, 0, 2]), np.array([0, 3.0, 0])
        for out in reduce_group(world, [[x], [y]], "float64", "orthogonal"):
            np.testing.assert_array_equal(out[0], x + y)
        for out in reduce_group(world, [[x], [x]], "float64", "parallel"):
            np.testing.assert_array_equal(out[0], x)
        for out in reduce_group(world, [[x], [0 * x]], "float64", "zero"):
            np.testing.assert_array_equal(out[0], x)
        for out in reduce_group(world, [[x], [y]], "float64", "factors", prescale_factor=2.0, postscale_factor=0.5):
            np.testing.assert_array_equal(out[0], x + y)


@pytest.mark.parametrize("size", [1e-300, 1e-200, 1e-162, 1e160, 1e200, 1e308])
def test_squares_may_leave_the_range_of_float64(size):
    random = np.random.default_rng(0)
    # The factor is a power of two, which rounds nothing.
    values, factor = np.trunc(4 * random.standard_normal((2, 100))), np.ldexp(1.0, np.frexp(size)[1] - 1)
    with World(2) as world:
        for out in reduce_group(world, [[size * np.ones(3)], [size * np.ones(3)]], "float64", "equal"):
            np.testing.assert_array_equal(out[0], size)
        expected = adasum(*values) * (factor / 16)
        for out in reduce_group(world, [[x * (factor / 16)] for x in values], "float64", "any"):
            np.testing.assert_allclose(out[0], expected, rtol=1e-12, atol=1e-12 * size)


def test_half_precision():
    random = np.random.default_rng(0)
    values = random.standard_normal((2, 100)).astype(np.float32)
    with World(2) as world:
        halves = values.astype(np.float16)
        expected = adasum(*halves.astype(np.float64))
        for out in reduce_group(world, [[h] for h in halves], "float16", "f16"):
            np.testing.assert_allclose(out[0], expected, rtol=1e-3, atol=1e-3)
        bits = [bfloat16_bits(v) for v in values]
        expected = adasum(*(from_bits(b).astype(np.float64) for b in bits))
        for out in reduce_group(world, [[b] for b in bits], "bfloat16", "bf16"):
            np.testing.assert_allclose(from_bits(out[0]), expected, rtol=1e-2, atol=1e-2)


def test_refusals():
    x = np.ones(3, np.float64)
    with World(3) as world, pytest.raises(HorovodInternalError, match="power of two of ranks, not 3"):
        reduce_group(world, [[x]] * 3, "float64", "three")
    with World(2) as world, pytest.raises(ValueError, match="does not take dtype int32"):
        reduce_group(world, [[x.astype(np.int32)]] * 2, "int32", "int")
