"""Codecs float16 and bfloat16 round each element once to nearest even, as in exact arithmetic."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import elements
from elements import BFLOAT16, ELEMENTS, FLOAT16, FLOAT32, FLOAT64, assert_same_bits, lib

CODES = {lib.BHVD_CODEC_FLOAT16: FLOAT16, lib.BHVD_CODEC_BFLOAT16: BFLOAT16}


def round_to_bfloat16(x):
    """float64 to bfloat16 in exact arithmetic: 8 bits of significand, exponents from -126, infinity on overflow."""
    with np.errstate(over="ignore", invalid="ignore"):
        _, exponent = np.frexp(x)
        unit = np.ldexp(1.0, np.maximum(exponent - 8, -133))
        nearest = np.where(np.isfinite(x), np.rint(x / unit) * unit, x)
        return np.where(np.abs(nearest) >= 2.0**128, np.copysign(np.inf, x), nearest)


def round_once(code, x):
    """x (float64) rounded to the code's type."""
    if code is BFLOAT16:
        return round_to_bfloat16(x)
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float64)


def check(codec, element, stored):
    code = CODES[codec]
    with np.errstate(invalid="ignore"):         # signalling NaNs
        x = element.load(stored).astype(np.float64)
    encoded = elements.encode(codec, element, stored)
    assert encoded.size == 2 * stored.size
    codes = encoded.view(code.storage)
    np.testing.assert_array_equal(code.load(codes).astype(np.float64), round_once(code, x))
    np.testing.assert_array_equal(np.signbit(code.load(codes)), np.signbit(x))
    decoded = elements.decode(codec, element, encoded, stored.size)
    with np.errstate(over="ignore"):
        expected = element.load(element.store(code.load(codes).astype(element.real)))
    np.testing.assert_array_equal(element.load(decoded), expected)


@pytest.mark.parametrize("codec, element, values, codes", [
    (lib.BHVD_CODEC_FLOAT16, FLOAT32, [1.0, -2.0, 65519.0, 65520.0, np.inf], "003c 00c0 ff7b 007c 007c"),
    (lib.BHVD_CODEC_BFLOAT16, FLOAT32, [1.0, -2.0, 1.00390625, 1.01171875, -np.inf], "803f 00c0 803f 823f 80ff"),
    (lib.BHVD_CODEC_FLOAT16, FLOAT32, [np.nan], "007e"),
    (lib.BHVD_CODEC_BFLOAT16, FLOAT64, [np.nan], "c07f"),
    (lib.BHVD_CODEC_FLOAT16, BFLOAT16, [1.0, 65536.0], "003c 007c"),
    # just above halfway between 1 and the next number; rounded to float32 first, it would become 1
    (lib.BHVD_CODEC_FLOAT16, FLOAT64, [1 + 2.0**-11 + 2.0**-40], "013c"),
    (lib.BHVD_CODEC_BFLOAT16, FLOAT64, [1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8 - 2.0**-40], "813f 803f"),
    (lib.BHVD_CODEC_FLOAT16, FLOAT64, [65520 - 2.0**-30, 1e300, 2.0**-25 * (1 + 2.0**-30)], "ff7b 007c 0100"),
    (lib.BHVD_CODEC_FLOAT16, FLOAT32, [], ""),
])
def test_golden_bytes(codec, element, values, codes):
    stored = element.store(np.array(values, element.real))
    assert elements.encode(codec, element, stored).tobytes() == bytes.fromhex(codes)


@pytest.mark.parametrize("codec", CODES)
@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_gaussian_data(codec, element, count):
    check(codec, element, element.store(np.random.default_rng(count).standard_normal(count).astype(element.real)))


@pytest.mark.parametrize("codec", CODES)
@pytest.mark.parametrize("element", [FLOAT16, BFLOAT16], ids=repr)
def test_every_number_of_16_bits(codec, element):
    check(codec, element, np.arange(65536, dtype=np.uint16).view(element.storage))


@pytest.mark.parametrize("element", [FLOAT16, BFLOAT16], ids=repr)
def test_its_own_type_passes_unchanged(element):
    stored = np.arange(65536, dtype=np.uint16).view(element.storage)
    stored = stored[~np.isnan(element.load(stored))]
    codec = lib.BHVD_CODEC_FLOAT16 if element is FLOAT16 else lib.BHVD_CODEC_BFLOAT16
    assert_same_bits(elements.decode(codec, element, elements.encode(codec, element, stored), stored.size), stored)


@pytest.mark.parametrize("codec", CODES)
@pytest.mark.parametrize("element", [FLOAT32, FLOAT64], ids=repr)
def test_any_bits(codec, element):
    @settings(max_examples=300)
    @given(hnp.arrays(np.dtype(f"u{element.storage.itemsize}"), st.integers(0, 40)))
    def run(bits):
        with np.errstate(invalid="ignore"):     # signalling NaNs
            check(codec, element, bits.view(element.storage))

    run()


@pytest.mark.parametrize("codec", CODES)
def test_any_numbers_of_float64(codec):
    @settings(max_examples=300)
    @given(hnp.arrays(np.float64, st.integers(0, 40), elements=st.floats(-7e4, 7e4)), st.integers(-40, 0))
    def run(x, exponent):
        check(codec, FLOAT64, x * 2.0**exponent)

    run()
