"""Codecs sign and sign_rms against the equation in NumPy and against hand-computed bytes.

    a = ||x||_1 / d, or ||x||_2 / sqrt(d)        D(Q(x)) = a where x >= 0, -a where x < 0

The norm is summed in float64, in blocks of 512 elements: partial sum j over the elements i = j mod 16 in rising order,
then partial sums j and j + w are added for w = 8, 4, 2, 1. The blocks' sums are added in the same order.
"""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import elements
from elements import BFLOAT16, ELEMENTS, FLOAT16, FLOAT32, FLOAT64, assert_same_bits, lib

SIGN, SIGN_RMS = lib.BHVD_CODEC_SIGN, lib.BHVD_CODEC_SIGN_RMS
CODECS = [SIGN, SIGN_RMS]


def ordered_sum(values):
    """The sum of float64 values in the order of the wire format."""
    return sum_of_parts(np.array([sum_of_parts(values[at : at + 512]) for at in range(0, values.size, 512)]))


def sum_of_parts(values):
    rows = np.append(values, np.zeros(-values.size % 16)).reshape(-1, 16)
    parts = np.zeros(16)
    for row in rows:
        parts += row
    for w in (8, 4, 2, 1):
        parts[:w] += parts[w : 2 * w]
    return parts[0]


def encode_by_equation(codec, element, stored):
    x = element.load(stored)
    encoded = np.zeros(32 + -(-x.size // 256) * 32, np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):
        magnitudes = np.abs(x.astype(np.float64))
        total = ordered_sum(magnitudes if codec == SIGN else magnitudes * magnitudes)
    encoded[16] = 2
    if np.isfinite(total):
        mean = total / x.size if x.size else 0.0
        a = element.real(mean if codec == SIGN else np.sqrt(mean))
        bits = np.packbits(x < 0, bitorder="little")
        encoded[32 : 32 + bits.size] = bits
    else:
        a = element.real(np.nan)
        encoded[17] = 1
    encoded[: a.nbytes] = np.frombuffer(a.tobytes(), np.uint8)
    return encoded


def decode_by_equation(element, encoded, count):
    a = encoded[: np.dtype(element.real).itemsize].view(element.real)[0]
    negative = np.unpackbits(encoded[32:], bitorder="little")[:count]
    return element.store(np.where(negative, -a, a).astype(element.real))


def check_equation(codec, element, stored):
    encoded = elements.encode(codec, element, stored)
    np.testing.assert_array_equal(encoded, encode_by_equation(codec, element, stored))
    decoded = elements.decode(codec, element, encoded, stored.size)
    assert_same_bits(decoded, decode_by_equation(element, encoded, stored.size))
    return element.load(decoded)


def golden(header, is_finite, bits):
    padded = bytes(bits).ljust(-(-len(bits) // 32) * 32, b"\0")
    return bytes.fromhex(header).ljust(16, b"\0") + bytes([2, not is_finite]) + bytes(14) + padded


# Codec, elements, the scale as bytes in memory, the bits.
GOLDEN = {
    "empty": (SIGN, FLOAT32, [], "00000000", []),
    "zeros": (SIGN, FLOAT32, [0.0, -0.0, 0.0], "00000000", [0]),
    "mean": (SIGN, FLOAT32, [1.0, -2.0, 0.0, -5.0], "00000040", [0b1010]),
    "root mean square": (SIGN_RMS, FLOAT32, [-3.0, 4.0, 0.0, 0.0], "00002040", [0b0001]),
    "two blocks": (SIGN, FLOAT32, [1.0] * 256 + [-1.0], "0000803f", [0] * 32 + [1]),
    "nan": (SIGN, FLOAT32, [-1.0, np.nan], "0000c07f", [0]),
    "infinity": (SIGN_RMS, FLOAT32, [-1.0, -np.inf], "0000c07f", [0]),
    "float16": (SIGN, FLOAT16, [-1.0, 3.0], "00000040", [0b01]),
    "bfloat16": (SIGN_RMS, BFLOAT16, [-1.0, 1.0], "0000803f", [0b01]),
    "float64": (SIGN, FLOAT64, [-1.0, -3.0], "0000000000000040", [0b11]),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_bytes(case):
    codec, element, values, header, bits = GOLDEN[case]
    stored = element.store(np.array(values, element.real))
    assert elements.encode(codec, element, stored).tobytes() == golden(header, np.isfinite(values).all(), bits)
    check_equation(codec, element, stored)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 255, 256, 257, 512, 513, 5003, 8192 + 31])
def test_equation_for_gaussian_data(codec, element, count):
    stored = element.store(np.random.default_rng(count).standard_normal(count).astype(element.real))
    check_equation(codec, element, stored)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 98, 299])
def test_one_nonfinite_element_makes_the_chunk_nan(codec, element, poison, position):
    x = np.linspace(-1, 1, 300).astype(element.real)
    x[position] = poison
    assert np.isnan(check_equation(codec, element, element.store(x))).all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("element", [FLOAT32, FLOAT16, BFLOAT16], ids=repr)
def test_the_largest_numbers_stay_finite(codec, element):
    largest = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}.get(element.name, np.finfo(np.float32).max)
    stored = element.store(np.array([largest, -largest] * 50, element.real))
    np.testing.assert_array_equal(check_equation(codec, element, stored), element.load(stored))


def test_error_feedback_contracts():
    """EF-signSGD needs ||D(Q(x)) - x||^2 <= (1 - c) ||x||^2, here with c = ||x||_1^2 / (d ||x||_2^2)."""
    x = np.random.default_rng(1).standard_normal(10000).astype(np.float32)
    error = check_equation(SIGN, FLOAT32, x).astype(np.float64) - x
    c = np.abs(x).sum(dtype=np.float64) ** 2 / (x.size * np.square(x, dtype=np.float64).sum())
    np.testing.assert_allclose(np.square(error).sum(), (1 - c) * np.square(x, dtype=np.float64).sum(), rtol=1e-5)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
def test_any_bits(codec, element):
    @settings(max_examples=150)
    @given(hnp.arrays(np.dtype(f"u{element.storage.itemsize}"), st.integers(0, 70)))
    def check(bits):
        with np.errstate(invalid="ignore"):     # signalling NaNs
            check_equation(codec, element, bits.view(element.storage))

    check()
