"""Codec qsgd against the equation in NumPy and against hand-computed bytes.

    n = ||x||_2 over a block of 512        f = s / n
    q = sign(x) min(floor(|x| f + u), s)   D(Q(x)) = (q (1 / s)) n

n is summed in float64 in the order of test_sign.py; it is at most the largest number of the element type, and at least
s 2^-126 (float64: s 2^-1022) unless 0.
"""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import elements
from codec_random import uniform
from elements import BFLOAT16, ELEMENTS, FLOAT16, FLOAT32, FLOAT64, lib

QSGD, BLOCK = lib.BHVD_CODEC_QSGD, 512
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": np.finfo(np.float32).max,
           "float64": np.finfo(np.float64).max}


def ordered_squares(x):
    rows = np.append(x, np.zeros(-x.size % 16)).astype(np.float64).reshape(-1, 16)
    parts = np.zeros(16)
    for row in rows:
        parts += row * row
    for w in (8, 4, 2, 1):
        parts[:w] += parts[w : 2 * w]
    return parts[0]


def norm_of(element, x, levels):
    with np.errstate(over="ignore", invalid="ignore"):
        squares = ordered_squares(x)
    if not np.isfinite(squares):
        return element.real(np.nan)
    n = np.sqrt(squares)
    return element.real(n if n == 0 else np.clip(n, levels / element.scale_max, LARGEST[element.name]))


def padded(nbytes):
    return (nbytes + 31) // 32 * 32


def layout(element, count):
    """(end of the norms, end of the codes)."""
    norms = padded((count + BLOCK - 1) // BLOCK * np.dtype(element.real).itemsize)
    return 32 + norms, 32 + norms + padded(count)


def encode_by_equation(element, stored, levels, seed):
    x, u = element.load(stored), uniform(seed, stored.size)
    codes_at, end = layout(element, x.size)
    encoded = np.zeros(end, np.uint8)
    norms = np.array([norm_of(element, x[i : i + BLOCK], levels) for i in range(0, x.size, BLOCK)], element.real)
    encoded[32 : 32 + norms.nbytes] = norms.view(np.uint8)
    encoded[16], encoded[17], encoded[18] = 1, np.isnan(norms).any(), levels
    for i, n in zip(range(0, x.size, BLOCK), norms, strict=True):
        if n > 0:
            block = x[i : i + BLOCK]
            r = np.abs(block) * element.real(levels / np.float64(n))
            q = np.minimum(np.floor(r + u[i : i + BLOCK]), levels)
            encoded[codes_at + i : codes_at + i + block.size] = (np.sign(block) * q).astype(np.int8).view(np.uint8)
    return encoded


def decode_by_equation(element, encoded, count):
    codes_at, _ = layout(element, count)
    norms = encoded[32:codes_at].view(element.real)
    q = encoded[codes_at : codes_at + count].view(np.int8).astype(element.real)
    step = element.real(1) / element.real(encoded[18])
    return element.store((q * step * np.repeat(norms, BLOCK)[:count]).astype(element.real))


def check_equation(element, stored, levels=127, seed=1):
    encoded = elements.encode(QSGD, element, stored, levels, seed)
    np.testing.assert_array_equal(encoded, encode_by_equation(element, stored, levels, seed))
    decoded = elements.decode(QSGD, element, encoded, stored.size, levels)
    expected = element.load(decode_by_equation(element, encoded, stored.size))
    np.testing.assert_array_equal(element.load(decoded), expected)
    return expected


def test_golden_bytes():
    """Elements on levels are not rounded, for any seed: 3, -4 and 12 with a norm of 13."""
    x = np.array([3.0, -4.0, 0.0, 12.0], np.float32)
    header = bytes(16) + bytes([1, 0, 13]) + bytes(13)
    codes = np.array([3, -4, 0, 12], np.int8).tobytes() + bytes(28)
    for seed in range(20):
        encoded = elements.encode(QSGD, FLOAT32, x, 13, seed).tobytes()
        assert encoded == header + bytes.fromhex("00005041").ljust(32, b"\0") + codes


def test_golden_bytes_of_random_rounding():
    encoded = elements.encode(QSGD, FLOAT32, np.linspace(-1, 1, 16, dtype=np.float32), 4, 42)
    assert encoded[64:80].view(np.int8).tolist() == [-2, -2, -1, -1, -1, -1, -1, 0, 0, 1, 0, 1, 1, 2, 1, 1]


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 511, 512, 513, 5003])
@pytest.mark.parametrize("levels", [1, 7, 49, 127])
def test_equation_for_gaussian_data(element, count, levels):
    stored = element.store(np.random.default_rng(count).standard_normal(count).astype(element.real))
    for seed in (0, 1, 2**64 - 1):
        check_equation(element, stored, levels, seed)


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_one_nonfinite_element_makes_its_block_nan_and_no_other(element, poison):
    x = np.linspace(-1, 1, 1500).astype(element.real)
    x[700] = poison
    is_nan = np.isnan(check_equation(element, element.store(x)))
    assert is_nan[512:1024].all() and not is_nan[:512].any() and not is_nan[1024:].any()


@pytest.mark.parametrize("element", [FLOAT16, BFLOAT16, FLOAT32], ids=repr)
def test_the_largest_numbers_stay_finite(element):
    stored = element.store(np.array([LARGEST[element.name], -LARGEST[element.name]] * 500, element.real))
    np.testing.assert_allclose(check_equation(element, stored), element.load(stored), rtol=1e-6)


@pytest.mark.parametrize("element", [FLOAT32, BFLOAT16, FLOAT64], ids=repr)
@pytest.mark.parametrize("exponent", [-10, -30, -37, 30])
def test_the_mean_over_seeds_is_the_element_at_any_scale(element, exponent):
    stored = element.store((np.linspace(-1, 1, 500) * 10.0**exponent).astype(element.real))
    x, seeds, levels = element.load(stored).astype(np.float64), 300, 5
    mean = sum(check_equation(element, stored, levels, seed).astype(np.float64) for seed in range(seeds)) / seeds
    level = np.float64(norm_of(element, element.load(stored), levels)) / levels
    p = np.abs(x) / level % 1
    deviation = level * np.sqrt(p * (1 - p) / seeds)
    rounding = 2.0**-7 * np.abs(mean) if element is BFLOAT16 else 0
    assert (np.abs(mean - x) <= 5 * deviation + 1e-3 * level + rounding).all()


def test_float16_mean_over_seeds():
    stored = FLOAT16.store(np.linspace(-1, 1, 500))
    mean = sum(check_equation(FLOAT16, stored, 5, seed).astype(np.float64) for seed in range(300)) / 300
    level = np.linalg.norm(FLOAT16.load(stored).astype(np.float64)) / 5
    assert (np.abs(mean - FLOAT16.load(stored)) <= 5 * level * np.sqrt(0.25 / 300)).all()


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
def test_any_bits(element):
    @settings(max_examples=150)
    @given(hnp.arrays(np.dtype(f"u{element.storage.itemsize}"), st.integers(0, 70)), st.integers(1, 127))
    def check(bits, levels):
        with np.errstate(invalid="ignore"):     # signalling NaNs
            check_equation(element, bits.view(element.storage), levels)

    check()
