"""Codec ternary against the equation in NumPy and against bytes worked out by hand.

    s = max |x|        b = 1 where u s < |x|, else 0        D(Q(x)) = s sign(x) b
"""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import elements
from codec_random import uniform
from elements import ELEMENTS, FLOAT32, assert_same_bits, lib

TERNARY = lib.BHVD_CODEC_TERNARY


def bits_of(flags):
    """One uint32 for every 32 flags, the first in bit 0."""
    padded = np.append(flags, np.zeros(-flags.size % 32, bool))
    return np.packbits(padded, bitorder="little").view("<u4")


def encode_by_equation(element, stored, seed):
    x = element.load(stored)
    blocks = -(-x.size // 32)
    encoded = np.zeros(32 + -(-blocks // 4) * 32, np.uint8)
    encoded[16] = 1
    if np.isfinite(x).all():
        s = np.abs(x).max(initial=element.real(0))
        kept = uniform(seed, x.size).astype(element.real) * s < np.abs(x)
        planes = np.stack([bits_of(kept), bits_of(kept & (x < 0))], axis=1)
        encoded[32 : 32 + 8 * blocks] = planes.reshape(-1).view(np.uint8)
    else:
        s = element.real(np.nan)
        encoded[17] = 1
    encoded[: s.nbytes] = np.frombuffer(s.tobytes(), np.uint8)
    return encoded


def decode_by_equation(element, encoded, count):
    s = encoded[: np.dtype(element.real).itemsize].view(element.real)[0]
    planes = encoded[32:].view("<u4").reshape(-1, 2)
    kept, negative = (np.unpackbits(np.ascontiguousarray(planes[:, p]).view(np.uint8), bitorder="little")[:count]
                      for p in (0, 1))
    magnitude = np.full(count, s) if np.isnan(s) else kept * s
    return element.store(np.where(negative, -magnitude, magnitude).astype(element.real))


def check_equation(element, stored, seed=1):
    encoded = elements.encode(TERNARY, element, stored, seed=seed)
    np.testing.assert_array_equal(encoded, encode_by_equation(element, stored, seed))
    decoded = elements.decode(TERNARY, element, encoded, stored.size)
    assert_same_bits(decoded, decode_by_equation(element, encoded, stored.size))
    return element.load(decoded)


def test_golden_bytes():
    """The largest always stays, a zero never does, whatever the seed."""
    x = np.zeros(33, np.float32)
    x[[0, 5, 32]] = -2.0, 2.0, -2.0
    header = bytes.fromhex("00000040").ljust(16, b"\0") + bytes([1]) + bytes(15)
    codes = bytes([0b100001, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]) + bytes(16)
    for seed in range(20):
        assert elements.encode(TERNARY, FLOAT32, x, seed=seed).tobytes() == header + codes


def test_golden_bytes_of_random_rounding():
    encoded = elements.encode(TERNARY, FLOAT32, np.linspace(-1, 1, 32, dtype=np.float32), seed=42)
    assert encoded[32:40].tobytes().hex() == "b700f0fdb7000000"


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 127, 128, 129, 5003])
def test_equation_for_gaussian_data(element, count):
    stored = element.store(np.random.default_rng(count).standard_normal(count).astype(element.real))
    for seed in (0, 1, 2**64 - 1):
        check_equation(element, stored, seed)


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 98, 299])
def test_one_nonfinite_element_makes_the_chunk_nan(element, poison, position):
    x = np.linspace(-1, 1, 300).astype(element.real)
    x[position] = poison
    assert np.isnan(check_equation(element, element.store(x))).all()


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
def test_the_mean_over_seeds_is_the_element(element):
    stored = element.store(np.linspace(-1, 1, 1000).astype(element.real))
    x, seeds = element.load(stored).astype(np.float64), 400
    mean = sum(check_equation(element, stored, seed).astype(np.float64) for seed in range(seeds)) / seeds
    deviation = np.sqrt(np.abs(x) * (1 - np.abs(x)) / seeds)                      # s = 1
    assert (np.abs(mean - x) <= 5 * deviation + 1e-6).all()
    assert abs((mean - x).mean()) < 5 * np.sqrt(np.square(deviation).sum()) / x.size


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
def test_any_bits(element):
    @settings(max_examples=150)
    @given(hnp.arrays(np.dtype(f"u{element.storage.itemsize}"), st.integers(0, 70)), st.integers(0, 2**64 - 1))
    def check(bits, seed):
        with np.errstate(invalid="ignore"):     # signalling NaNs
            check_equation(element, bits.view(element.storage), seed)

    check()
