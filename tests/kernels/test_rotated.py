"""Codecs rotated1 to rotated4 against the equations in NumPy (support/rotated.py) and hand-computed bytes."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import elements
import rotated
from bagua_hvd import codecs
from codec_random import words
from elements import BFLOAT16, ELEMENTS, FLOAT16, FLOAT32, FLOAT64, lib

BITS, SIZES = (1, 2, 3, 4), (256, 512, 1024, 2048)
F = np.float32


def number(bits):
    return getattr(lib, f"BHVD_CODEC_ROTATED{bits}")


def as_float32(element, stored):
    with np.errstate(over="ignore", invalid="ignore"):      # of float64
        return element.load(stored).astype(F)


def as_elements(element, x):
    largest = 65504 if element is FLOAT16 else np.inf
    return element.store(np.clip(x, -largest, largest).astype(element.real))


def check_equation(bits, element, stored, seed=1, size=512):
    encoded = elements.encode(number(bits), element, stored, size, seed)
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(encoded, rotated.encode(as_float32(element, stored), bits, seed, size))
        wanted = as_elements(element, rotated.decode(encoded, bits, stored.size, size))
    decoded = elements.decode(number(bits), element, encoded, stored.size, size)
    elements.assert_same_bits(decoded, wanted)
    return element.load(decoded)


# A single nonzero element, number 21 of 256: |y| = s everywhere, so q is the number of thresholds below 1. H has -1 in
# row i, column 21, if the bits of i & 21 have odd parity.
@pytest.mark.parametrize(("bits", "q", "level"), [(1, 0, 0.7978845608), (2, 1, 1.5104176085), (3, 1, 0.7560052813),
                                                  (4, 3, 0.9423404565)])
def test_golden_bytes(bits, q, level):
    x, key = np.zeros(256, F), 0x0102030405060708
    x[21] = 256
    first = int(words(key, np.arange(1))[0]) >> 21 & 1
    negative = np.array([first ^ (i & 21).bit_count() & 1 for i in range(256)])
    header = bytes([8, 7, 6, 5, 4, 3, 2, 1, *[0] * 8, 1, *[0] * 15])
    scale = F(1 / np.float64(F(level))).tobytes().ljust(32, b"\0")

    def part(numbers, b):
        each = [sum(int(numbers[16 * k + j]) << b * k for k in range(16 // b)) for j in range(16)]
        return b"".join(word.to_bytes(2, "little") for word in each)

    if bits == 3:
        codes = part([q] * 128, 2) + part([q] * 128, 2) + part(negative, 1)
    else:
        numbers, each = q | negative << (bits - 1), 256 // bits
        codes = b"".join(part(numbers[i:i + each], bits) for i in range(0, 256, each))
    encoded = elements.encode(number(bits), FLOAT32, x, 256, key)
    assert encoded.tobytes() == header + scale + codes
    np.testing.assert_allclose(elements.decode(number(bits), FLOAT32, encoded, 256, 256), x, rtol=0, atol=1e-4)


def test_golden_bytes_of_two_bits_are_as_they_were():
    """A single element with a known key: any change of the random generator changes the bytes."""
    x = np.zeros(256, F)
    x[0] = 1
    assert words(7, np.arange(2)).tolist() == GOLDEN_WORDS
    encoded = elements.encode(number(2), FLOAT32, x, 256, 7)
    assert set(encoded[64:].tolist()) == {0xFF if GOLDEN_WORDS[0] & 1 else 0x55}


GOLDEN_WORDS = [3149403831, 1776035194]


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
@pytest.mark.parametrize("count", [0, 1, 31, 256, 257, 511, 512, 513, 1300, 5003])
def test_equation_for_gaussian_data(element, count):
    stored = element.store(np.random.default_rng(count).standard_normal(count).astype(element.real))
    for bits in BITS:
        for seed in (0, 2**64 - 1):
            check_equation(bits, element, stored, seed)


@pytest.mark.parametrize("size", SIZES)
def test_sizes(size):
    for count in (3 * 2048 + 40, 2048 + 300, size, size - 1):
        stored = np.random.default_rng(size).standard_cauchy(count).astype(F)
        for bits in BITS:
            check_equation(bits, FLOAT32, stored, size=size)


@pytest.mark.parametrize(("bits", "error"), [(1, 0.6), (2, 0.14), (3, 0.037), (4, 0.0105)])
def test_error_whatever_the_elements_are(bits, error):
    """The squared error relative to that of the elements: the loss for normal elements with an unbiased scale."""
    random = np.random.default_rng(2)
    for x in (random.standard_normal(20480), random.standard_normal(20480) * np.exp(random.standard_normal(20480)),
              np.ones(20480), random.uniform(0, 1, 20480)):
        x = x.astype(F)
        code = elements.encode(number(bits), FLOAT32, x, 512, 3)
        lost = elements.decode(number(bits), FLOAT32, code, x.size, 512) - x
        assert (lost**2).sum() <= error * (x**2).sum()


@pytest.mark.parametrize("element", [FLOAT32, BFLOAT16, FLOAT64], ids=repr)
@pytest.mark.parametrize("exponent", [-140, -120, -60, -45, 0, 60, 90])
def test_error_at_any_scale(element, exponent):
    x = np.random.default_rng(3).standard_normal(1024) * (32 if exponent < -125 else 1)
    stored = element.store((x * 2.0**exponent).astype(element.real))
    x = element.load(stored).astype(np.float64) / 2.0**exponent
    for bits in BITS:
        decoded = check_equation(bits, element, stored).astype(np.float64)
        error = ((decoded / 2.0**exponent - x) ** 2).sum() / (x**2).sum()
        assert error < 2.6 * 4.0**-bits + (0.01 if exponent < -125 else 0)


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
@pytest.mark.parametrize("poison", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_nonfinite_element_makes_its_block_nan_and_no_other(element, poison):
    for position in (512, 700, 1023):
        x = np.linspace(-1, 1, 1300).astype(element.real)
        x[position] = poison
        for bits in BITS:
            is_nan = np.isnan(check_equation(bits, element, element.store(x)))
            assert is_nan[512:1024].all() and not is_nan[:512].any() and not is_nan[1024:].any()


@pytest.mark.parametrize("element", [FLOAT32, BFLOAT16, FLOAT64], ids=repr)
def test_a_block_beyond_the_largest_scale_is_nan(element):
    stored = element.store(np.full(300, 2.0**125, element.real))
    for bits in BITS:
        assert np.isnan(check_equation(bits, element, stored)).all()


def test_a_float64_beyond_float32_makes_its_block_nan():
    x = np.ones(600)
    x[3] = 1e300
    for bits in BITS:
        is_nan = np.isnan(check_equation(bits, FLOAT64, x))
        assert is_nan[:512].all() and not is_nan[512:].any()


def test_the_largest_float16_stays_finite():
    for bits in BITS:
        assert np.abs(check_equation(bits, FLOAT16, np.full(700, 65504, np.float16))).max() <= 65504


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
def test_a_block_of_zeros_stays_zero(element):
    x = np.zeros(1300, element.real)
    x[:512] = 1
    for bits in BITS:
        decoded = check_equation(bits, element, element.store(x))
        assert not decoded[512:].any() and not np.signbit(decoded[512:]).any()


@pytest.mark.parametrize("bits", BITS)
def test_the_mean_of_ten_thousand_rotations_is_the_element(bits):
    """Each block has its own signs, so blocks with equal elements are independent draws.

    The mean's remaining error is the draws' noise plus the bias. This bounds the bias's energy relative to that of the
    elements: none is found for normal elements; for lognormal ones (sigma 1.5) it is below the table's value.
    """
    draws, random = 10_000, np.random.default_rng(4)
    for sigma, bound in ((0, 0), (1.5, {1: 1e-3, 2: 2e-4, 3: 2e-5, 4: 2e-6}[bits])):
        x = (random.standard_normal(512) * np.exp(sigma * random.standard_normal(512))).astype(F)
        code = elements.encode(number(bits), FLOAT32, np.tile(x, draws), 512, 11)
        decoded = elements.decode(number(bits), FLOAT32, code, 512 * draws, 512).reshape(draws, 512).astype(np.float64)
        energy = (x.astype(np.float64) ** 2).sum()
        noise = decoded.var(0, ddof=1).sum() / draws / energy
        bias = ((decoded.mean(0) - x) ** 2).sum() / energy - noise
        assert bias < bound + 0.3 * noise


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
def test_any_bits(element):
    @settings(max_examples=100, deadline=None)
    @given(hnp.arrays(np.dtype(f"u{element.storage.itemsize}"), st.integers(0, 600)), st.sampled_from(BITS),
           st.sampled_from(SIZES))
    def check(stored, bits, size):
        with np.errstate(invalid="ignore"):     # signalling NaNs
            check_equation(bits, element, stored.view(element.storage), size=size)

    check()


@pytest.mark.parametrize("bits", [0, 5, 2.5, "2", None, True])
def test_refuses_other_numbers_of_bits(bits):
    with pytest.raises(ValueError, match=r"rotated\(bits=.*\): expected 1, 2, 3 or 4"):
        codecs.rotated(bits)


@pytest.mark.parametrize("size", [0, 128, 300, 4096, -512])
def test_refuses_other_blocks(size):
    with pytest.raises(ValueError, match=r"rotated\(block=.*\): expected 256, 512, 1024 or 2048"):
        codecs.rotated(2, size)


@pytest.mark.parametrize("dtype", [np.int32, bool, np.complex64])
def test_refuses_other_dtypes(dtype):
    with pytest.raises(ValueError, match="codec rotated2 does not take dtype .*: convert to one of"):
        codecs.rotated().encode(np.ones(3, dtype))
