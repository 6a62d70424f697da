"""The core's Adam update (kernel/adam_kernels.c) against NumPy: dtypes, NaN, blocks and their remainders."""
import math

import ml_dtypes
import numpy as np
import pytest

from bagua_hvd.core import vectors

COUNTS = (1, 1023, 0, 1024, 2 * 1024 + 5)
NUMBERS = {"beta1": 0.9, "correction": 0.3, "eps": 1e-3, "longest": 0.8, "weight_decay": 0.5, "rate": 0.1, "decay": 0.0}
DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def arrays(dtype, seed):
    """One array for each of COUNTS, and all of them flat in the dtype of the computation."""
    numbers = np.random.default_rng(seed)
    made = [numbers.standard_normal(count).astype(dtype) for count in COUNTS]
    return made, flat(made)


def flat(made):
    wide = np.float64 if made[0].dtype == np.float64 else np.float32
    return np.concatenate([each.astype(wide) for each in made])


def views(made):
    return [vectors.array_view(each) for each in made]


def near(actual, expected, dtype):
    exact = {"float32": 1e-6, "float64": 1e-14}.get(np.dtype(dtype).name, 0.02)
    np.testing.assert_allclose(actual, expected, rtol=exact, atol=exact * np.nanmax(abs(expected)))


@pytest.mark.parametrize("in_steps", [False, True])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_momentum_and_step(dtype, in_steps):
    (m, m_flat), (g, g_flat), (x, x_flat) = (arrays(dtype, seed) for seed in range(3))
    v = [abs(each) for each in arrays(dtype, 3)[0]]
    for each in v:
        each[::7] = 0                       # no gradient during the warm-up
    g[1][5], g[4][1030] = np.nan, np.inf
    g_flat, v_flat = flat(g), flat(v)
    beta1, longest, decay, rate = (NUMBERS[name] for name in ("beta1", "longest", "weight_decay", "rate"))
    p = np.sqrt(v_flat) / NUMBERS["correction"] + NUMBERS["eps"]
    sent = np.full_like(m_flat, 7)
    vectors.adam_momentum(views(m), views(v), views(g), views(x), [NUMBERS] * len(COUNTS), in_steps, sent)
    moved = np.where(v_flat == 0, 0, beta1 * m_flat + (1 - beta1) * (g_flat + decay * x_flat))
    bounded = np.clip(moved, -longest * p, longest * p)
    assert np.isnan(sent[1 + 5]) and not np.isnan(np.delete(sent, 1 + 5)).any(), "a NaN stays; infinity is bounded"
    near(sent, bounded / p if in_steps else bounded, dtype)
    near(flat(m), m_flat, dtype)            # the optimizer's own

    sent = 3 * m_flat
    decoupled = [NUMBERS | {"decay": 0.25}] * len(COUNTS)
    vectors.adam_step(views(m), views(v), views(x), decoupled, in_steps, sent)
    received = np.clip(np.where(v_flat == 0, 0, sent * p if in_steps else sent), -longest * p, longest * p)
    near(flat(m), received, dtype)
    near(flat(x), x_flat - (rate * received / p + 0.25 * x_flat), dtype)


def test_without_bound_and_decay():
    m, v, g = (np.ones(3, np.float32) for _ in range(3))
    g *= 1000
    sent = np.zeros(3, np.float32)
    numbers = NUMBERS | {"longest": math.inf, "weight_decay": 0.0}
    vectors.adam_momentum(views([m]), views([v]), views([g]), None, [numbers], False, sent)
    np.testing.assert_allclose(sent, 0.9 + 100, rtol=1e-6)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_variance(dtype, exact):
    v, (g, g_flat) = arrays(dtype, 0)[0], arrays(dtype, 1)
    shared, own = (abs(arrays(dtype, seed)[1]) for seed in (2, 3))
    numbers = {"beta2": 0.99, "exact_rate": 0.3 if exact else 0.0, "own_rate": 0.2, "correction": 0.03, "ranks": 3.0}
    square = g_flat * g_flat
    of_all, of_mine = shared + numbers["exact_rate"] * (square - shared), own + 0.2 * (square - own)
    used = np.maximum(0.03 * np.clip(of_all, of_mine / 3, of_mine) - 0.01 * square, 0) / 0.99
    vectors.adam_variance(views(v), views(g), [numbers] * len(COUNTS), shared, own)
    near(shared, of_all, dtype)
    near(own, of_mine, dtype)
    near(flat(v), used, dtype)


def test_a_nan_in_a_relaxed_step_leaves_the_exact_variance():
    v, g, shared, own = (np.ones(2, np.float32) for _ in range(4))
    g[0] = np.nan
    numbers = {"beta2": 0.99, "exact_rate": 0.0, "own_rate": 0.2, "correction": 0.03, "ranks": 3.0}
    vectors.adam_variance(views([v]), views([g]), [numbers], shared, own)
    assert (shared == 1).all() and np.isnan(own[0]) and np.isnan(v[0]) and np.isfinite(v[1])


def test_what_does_not_fit():
    m, sent = np.ones(3, np.float32), np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="1 tensors of 3 elements do not fit a flat array of 4"):
        vectors.adam_step(views([m]), views([m]), views([m]), [NUMBERS], False, sent)
    with pytest.raises(ValueError, match="tensors of float32, int32 cannot be computed with as float32"):
        vectors.adam_step(views([m]), views([m]), views([m.astype(np.int32)]), [NUMBERS], False, sent[:3])
    with pytest.raises(ValueError, match="cannot be computed with as int32"):
        vectors.adam_step(views([m]), views([m]), views([m]), [NUMBERS], False, np.zeros(3, np.int32))
