"""ByteGrad against its equation, transcribed in NumPy, bit for bit.

    s[k] = mean_i D(Q(g_i[k]))      g = concat_k D(Q(s[k]))
"""
import math

import numpy as np
import pytest

from bagua_hvd.algorithms import ByteGrad
from bagua_hvd.core import native
from bagua_hvd.core.native import TensorView
from bagua_hvd.job import basics
from bagua_hvd.job.process_sets import global_process_set
from bagua_hvd.training.buckets import Bucket, Member

F = np.float32


def round_trip(x):
    """D(Q(x)) of one chunk of float32: native/kernel/minmax_uint8.h, the arithmetic in float32."""
    if len(x) == 0:
        return x
    if not np.isfinite(x).all():
        return np.full_like(x, np.nan)
    mn, mx = x.min() + F(0), x.max() + F(0)
    if mn == mx:
        return np.full_like(x, mn)
    half_range = 0.5 * float(mx) - 0.5 * float(mn)
    s, t = F(min(127.5 / half_range, 2.0**126)), F(max(half_range / 127.5, 2.0**-126))
    lb = np.rint(mx * s) - F(255)
    q = np.clip(np.rint(x * s) - lb, F(0), F(255))
    return np.clip((q + lb) * t, mn, mx)


def chunks(count, n):
    """Chunk k of a flat bucket: the first count % n chunks are one element longer."""
    ends = np.cumsum([count // n + (k < count % n) for k in range(n)])
    return [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def bytegrad(gradients, average=True, worker_errors=None, server_errors=None):
    """The result, equal on all ranks. Updates errors in place: a worker's over the bucket, a server's over a chunk."""
    n, count = len(gradients), len(gradients[0])
    result = np.empty(count, F)
    for k, chunk in enumerate(chunks(count, n)):
        total = np.zeros(chunk.stop - chunk.start, F)
        for i in range(n):
            v = gradients[i][chunk] + (worker_errors[i][chunk] if worker_errors else F(0))
            decoded = round_trip(v)
            total = total + decoded
            if worker_errors:
                worker_errors[i][chunk] = v - decoded
        u = total * F(1 / n) if average and n > 1 else total
        if server_errors:
            u = u + server_errors[k][:len(u)]
        result[chunk] = round_trip(u)
        if server_errors:
            server_errors[k][:len(u)] = u - result[chunk]
    return result


def gradient_of(rank, count, seed, scale=1.0):
    return (np.random.default_rng([seed, rank]).standard_normal(count) * scale).astype(F)


def bucket_over(arrays, name):
    codes = {np.dtype(np.float32): native.FLOAT32, np.dtype(np.float64): native.FLOAT64,
             np.dtype(np.float16): native.FLOAT16}
    bucket = Bucket(name, {i: Member(f"{name}.{i}", a.shape, codes[a.dtype]) for i, a in enumerate(arrays)})
    for i, a in enumerate(arrays):
        bucket.place(i, TensorView(a.ctypes.data, a.ctypes.data, a.shape, codes[a.dtype], a))
    return bucket


def in_place(algorithm, flat, name, cuts=()):
    """Communicates a copy of `flat`, split at `cuts` into separate tensors, and returns the result flat."""
    parts = [part.copy() for part in np.split(flat, cuts)]
    algorithm.communicate(bucket_over(parts, name), global_process_set).wait()
    return np.concatenate(parts)


def assert_same_bits(actual, expected, what):
    same = (actual.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(actual) & np.isnan(expected))
    where = np.flatnonzero(~same)[:5]
    assert same.all(), (what, where, actual[where], expected[where])


def values():
    basics.init()
    rank, n = basics.rank(), basics.size()
    for count in (1, 2, 3, 5, 31, 32, 33, 1000, 4099, 100_003):
        for seed, scale in enumerate((1.0, 1e-9, 1e30, 0.0)):
            everyone = [gradient_of(r, count, seed, scale) for r in range(n)]
            what = f"{count}.{scale}"
            actual = in_place(ByteGrad(), everyone[rank], f"mean.{what}")
            assert_same_bits(actual, bytegrad(everyone), what)
            actual = in_place(ByteGrad(average=False), everyone[rank], f"sum.{what}")
            assert_same_bits(actual, bytegrad(everyone, average=False), what)
    # Data with an offset, symmetric extremes, and tensors that end within chunks.
    everyone = [gradient_of(r, 999, 7) + F(1000) for r in range(n)]
    assert_same_bits(in_place(ByteGrad(), everyone[rank], "offset", (10, 11, 500)), bytegrad(everyone), "offset")
    everyone = [np.linspace(-1 - r, 1 + r, 777).astype(F) for r in range(n)]
    assert_same_bits(in_place(ByteGrad(), everyone[rank], "symmetric", (776,)), bytegrad(everyone), "symmetric")


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_equals_the_equation_bit_for_bit(run_ranks, n):
    run_ranks(n, values, timeout=100)


def error_feedback():
    basics.init()
    rank, n = basics.rank(), basics.size()
    count, steps = 1003, 50
    algorithm = ByteGrad(error_feedback=True)
    gradient = np.empty(count, F)
    bucket = bucket_over([gradient], "feedback")
    worker_errors = [np.zeros(count, F) for _ in range(n)]
    server_errors = [np.zeros(native.chunk_count(count, n), F) for _ in range(n)]
    sent, exact = np.zeros(count), np.zeros(count)
    for step in range(steps):
        everyone = [gradient_of(r, count, step) for r in range(n)]
        everyone[0][0] = 1000.0                # without feedback, its chunk would lose all small elements
        gradient[:] = everyone[rank]
        algorithm.communicate(bucket, global_process_set).wait()
        assert_same_bits(gradient, bytegrad(everyone, True, worker_errors, server_errors), step)
        sent += gradient
        exact += np.mean(everyone, 0)
    # Errors do not accumulate over the steps: the sum stays within a level (range / 255) of each encoding.
    assert np.abs(sent - exact).max() < 2 * 1100 / 255, np.abs(sent - exact).max()
    # A checkpoint restores the error; one of another size is dropped with a warning.
    state = bucket.state.state_dict()
    other = bucket_over([gradient], "feedback")
    other.state.load_state_dict(state, own=True)
    assert other.state.state_dict() == state
    in_place(ByteGrad(), gradient, "none")
    assert bucket_over([gradient], "none").state.state_dict() == {}
    longer = bucket_over([np.zeros(count + 1, F)], "longer")
    longer.state.load_state_dict(state, own=True)
    with pytest.warns(UserWarning, match="error of longer in the checkpoint is of another size"):
        algorithm.communicate(longer, global_process_set).wait()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_error_feedback(run_ranks, n):
    run_ranks(n, error_feedback)


def special_values():
    basics.init()
    rank, n = basics.rank(), basics.size()
    for bad in (np.nan, np.inf, -np.inf):
        everyone = [gradient_of(r, 100, 3) for r in range(n)]
        everyone[-1][60] = bad
        actual = in_place(ByteGrad(), everyone[rank], f"bad.{bad}")
        assert_same_bits(actual, bytegrad(everyone), bad)
        assert math.isnan(actual[60])
    for dtype, tolerance in ((np.float64, 1e-6), (np.float16, 2e-3)):
        everyone = [gradient_of(r, 300, 5) for r in range(n)]
        actual = in_place(ByteGrad(), everyone[rank].astype(dtype), f"dtype.{dtype.__name__}")
        levels = max(np.ptp(g) for g in everyone) / 255     # rounding may reach the next level, in each encoding
        assert np.abs(actual - np.mean(everyone, 0)).max() <= levels * (1 + tolerance), dtype


def test_nan_infinity_and_other_dtypes(run_ranks):
    run_ranks(2, special_values)


def test_takes_floating_dtypes_only():
    algorithm = ByteGrad()
    assert all(map(algorithm.takes, (native.FLOAT32, native.FLOAT64, native.FLOAT16, native.BFLOAT16)))
    assert not any(map(algorithm.takes, (native.INT32, native.INT64, native.UINT8, native.BOOL)))
