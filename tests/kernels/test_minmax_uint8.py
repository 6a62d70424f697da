"""Codec minmax_uint8 against the equation in NumPy and against hand-computed bytes.

    s = 255 / (mx - mn)    ub = rint(mx s)    lb = ub - 255    q = min(max(rint(x s), lb), ub) - lb
    decode: min(max((q + lb) t, mn), mx),  t = (mx - mn) / 255

in float32, for float64 elements in float64; s and t are computed in float64 and rounded once; s <= 2^126 (2^1022).
"""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import elements
from elements import BFLOAT16, ELEMENTS, FLOAT16, FLOAT32, FLOAT64, ffi, lib

HEADER, BLOCK = 32, 32


def encode(element, stored):
    return elements.encode(lib.BHVD_CODEC_MINMAX_UINT8, element, stored)


def decode(element, encoded, count):
    return elements.decode(lib.BHVD_CODEC_MINMAX_UINT8, element, encoded, count)


def round_trip(element, stored):
    return element.load(decode(element, encode(element, stored), stored.size))


def scale_and_step(element, mn, mx):
    half = 0.5 * np.float64(mx) - 0.5 * np.float64(mn)      # half the range: the full range of float64 can overflow
    with np.errstate(divide="ignore", over="ignore"):
        s = np.float64(127.5) / half
    if s >= element.scale_max:
        return element.real(element.scale_max), element.real(1 / element.scale_max)
    return element.real(s), element.real(half / 127.5)


def encode_by_equation(element, stored):
    x = element.load(stored)
    encoded = np.zeros(HEADER + -(-x.size // BLOCK) * BLOCK, np.uint8)
    encoded[16] = 2
    if x.size == 0:
        return encoded
    if not np.isfinite(x).all():
        mn = mx = element.real(np.nan)
        encoded[17] = 1
    else:
        mn, mx = x.min() + element.real(0), x.max() + element.real(0)       # turns -0.0 into 0.0
    size = element.storage.itemsize
    encoded[: 2 * size] = element.store(np.array([mn, mx], element.real)).view(np.uint8)
    if mx > mn:
        s, _ = scale_and_step(element, mn, mx)
        lb = np.rint(mx * s) - element.real(255)
        encoded[HEADER : HEADER + x.size] = np.clip(np.rint(x * s) - lb, 0, 255).astype(np.uint8)
    return encoded


def decode_by_equation(element, encoded, count):
    size = element.storage.itemsize
    mn, mx = element.load(encoded[: 2 * size].view(element.storage))
    if not mx > mn:
        return np.full(count, element.store(mn))
    s, t = scale_and_step(element, mn, mx)
    lb = np.rint(mx * s) - element.real(255)
    with np.errstate(over="ignore"):
        x = (encoded[HEADER : HEADER + count].astype(element.real) + lb) * t
    return element.store(np.clip(x, mn, mx))


def check_equation(element, stored):
    encoded = encode(element, stored)
    np.testing.assert_array_equal(encoded, encode_by_equation(element, stored))
    decoded, expected = decode(element, encoded, stored.size), decode_by_equation(element, encoded, stored.size)
    np.testing.assert_array_equal(decoded.view(np.uint8), expected.view(np.uint8))


def check_error_bound(element, stored):
    x = element.load(stored)
    if x.size == 0 or not np.isfinite(x).all():
        return
    with np.errstate(over="ignore"):
        error = np.abs(round_trip(element, stored).astype(np.longdouble) - x)
    largest = np.abs(x).max().astype(np.longdouble)
    rounding = (8 * np.finfo(element.real).eps + element.epsilon) * largest
    level = max((np.longdouble(x.max()) - np.longdouble(x.min())) / 255, 1 / np.longdouble(element.scale_max))
    smallest = 2.0**-24 if element is FLOAT16 else 0.0       # elements below it are rounded to multiples of it
    assert (error <= 0.5 * level * (1 + 1e-6) + rounding + smallest).all()


def golden(header, is_finite, codes):
    padded = bytes(codes).ljust(-(-len(codes) // BLOCK) * BLOCK, b"\0")
    return bytes.fromhex(header).ljust(16, b"\0") + bytes([2, not is_finite]) + bytes(14) + padded


# Elements, then the header's mn and mx as bytes in memory, then the codes.
GOLDEN = {
    "empty": (FLOAT32, [], "", []),
    "zeros": (FLOAT32, [0.0] * 5, "00000000 00000000", [0] * 5),
    "negative zeros": (FLOAT32, [-0.0, 0.0, -0.0], "00000000 00000000", [0] * 3),
    "constant": (FLOAT32, [3.5] * 3, "00006040 00006040", [0] * 3),
    # s = 127.5: ub = 128, lb = -127; -1 has the level -128, which the lower clamp raises to -127
    "symmetric": (FLOAT32, [-1.0, 0.0, 1.0], "000080bf 0000803f", [0, 127, 255]),
    "outlier": (FLOAT32, [0.0, 0.0, 1000.0, 3.0], "00000000 00007a44", [0, 0, 255, 1]),
    # s = 255, lb = 255000; 1000.5 lies halfway, and is rounded to the even level 255128
    "offset": (FLOAT32, [1000.0, 1000.5, 1001.0], "00007a44 00407a44", [0, 128, 255]),
    "negative": (FLOAT32, [-510.0, -255.0, -254.0], "0000ffc3 00007ec3", [0, 254, 255]),
    "nan": (FLOAT32, [1.0, np.nan, 2.0], "0000c07f 0000c07f", [0] * 3),
    "infinity": (FLOAT32, [1.0, np.inf], "0000c07f 0000c07f", [0] * 2),
    "minus infinity": (FLOAT32, [-np.inf, 0.0], "0000c07f 0000c07f", [0] * 2),
    "more than a block": (FLOAT32, list(range(33)) + [255.0], "00000000 00007f43", [*range(33), 255]),
    "exactly a block": (FLOAT32, list(range(31)) + [255.0], "00000000 00007f43", [*range(31), 255]),
    "float16": (FLOAT16, [0.0, 255.0, 7.0], "0000 f85b", [0, 255, 7]),
    "float16 nan": (FLOAT16, [0.0, np.nan], "007e 007e", [0, 0]),
    "bfloat16": (BFLOAT16, [0.0, 255.0, 7.0], "0000 7f43", [0, 255, 7]),
    "bfloat16 infinity": (BFLOAT16, [0.0, np.inf], "c07f c07f", [0, 0]),
    "float64": (FLOAT64, [-1.0, 0.0, 1.0], "000000000000f0bf 000000000000f03f", [0, 127, 255]),
    "float64 nan": (FLOAT64, [np.nan], "000000000000f87f 000000000000f87f", [0]),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_bytes(case):
    element, values, header, codes = GOLDEN[case]
    stored = element.store(np.array(values, element.real))
    assert encode(element, stored).tobytes() == golden(header, np.isfinite(values).all(), codes)
    check_equation(element, stored)


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 1000, 4097])
def test_equation_and_bound_for_gaussian_data(element, count):
    rng = np.random.default_rng(count)
    stored = element.store(rng.standard_normal(count).astype(element.real))
    check_equation(element, stored)
    check_error_bound(element, stored)


@pytest.mark.parametrize("element", [FLOAT32, BFLOAT16, FLOAT64], ids=repr)
@pytest.mark.parametrize("exponent", [-7, -10, -20, -30, -36, -37, -38, -40, -44, -45, 20, 38])
def test_scales(element, exponent):
    """No absolute epsilon: relative precision does not depend on the scale, down to float32's smallest numbers."""
    x = np.random.default_rng(1).uniform(-1, 1, 1000) * 10.0**exponent
    stored = element.store(x.astype(element.real))
    check_equation(element, stored)
    check_error_bound(element, stored)
    if exponent >= -35:
        error = round_trip(element, stored).astype(np.float64) - element.load(stored)
        assert np.linalg.norm(error) < 0.01 * np.linalg.norm(x)


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
def test_whole_range_of_the_type_stays_finite(element):
    largest = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}.get(element.name, np.finfo(element.real).max)
    stored = element.store(np.array([-largest, 0.0, largest, largest / 3, -largest / 7], element.real))
    check_equation(element, stored)
    decoded = round_trip(element, stored)
    assert np.isfinite(decoded).all() and decoded[1] == 0 and np.abs(decoded).max() <= largest


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
@pytest.mark.parametrize("offset", [1e3, 1e4, -6e4, 1e6, 1e9])
def test_offset_data(element, offset):
    """Ranges of a few units in the last place have levels far above 2^24, where float32 has no more integers."""
    if element is FLOAT16 and abs(offset) > 65504:
        pytest.skip("beyond float16")
    base = element.load(element.store(np.array([offset], element.real)))
    for ulps in (1, 2, 3, 255, 300, 70000):
        x = base + np.linspace(0, 1, 100) * ulps * np.spacing(base) * (2 * element.epsilon / np.finfo(element.real).eps)
        stored = element.store(x.astype(element.real))
        if not np.isfinite(element.load(stored)).all():
            continue
        check_equation(element, stored)
        check_error_bound(element, stored)


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
@pytest.mark.parametrize("poison", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 1, 31, 32, 98, 99])
def test_one_nonfinite_element_makes_the_chunk_nan(element, poison, position):
    x = np.linspace(-1, 1, 100).astype(element.real)
    x[position] = poison
    stored = element.store(x)
    check_equation(element, stored)
    encoded = encode(element, stored)
    assert encoded[17] == 1
    assert np.isnan(element.load(decode(element, encoded, x.size))).all()


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.25, 1e-7, 6e4])
def test_constant_chunk_is_exact(element, value):
    stored = element.store(np.full(45, value, element.real))
    np.testing.assert_array_equal(decode(element, encode(element, stored), 45), stored)


def test_zero_is_exact_and_the_ends_keep_their_order():
    rng = np.random.default_rng(2)
    for _ in range(200):
        x = (rng.standard_normal(50) * 10.0 ** rng.integers(-30, 30)).astype(np.float32)
        x[7] = 0
        x[rng.integers(8, 50)] = -x[3]       # often a symmetric range, whose ends both round away from zero
        decoded = round_trip(FLOAT32, x)
        assert decoded[7] == 0
        assert decoded[x.argmin()] == decoded.min() and decoded[x.argmax()] == decoded.max()


def test_second_encoding_of_decoded_data_stays_within_its_range():
    x = np.random.default_rng(3).standard_normal(1000).astype(np.float32)
    once = round_trip(FLOAT32, x)
    assert once.min() >= x.min() and once.max() <= x.max()


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
def test_any_bits(element):
    @settings(max_examples=300)
    @given(hnp.arrays(np.dtype(f"u{element.storage.itemsize}"), st.integers(0, 70)))
    def check(bits):
        stored = bits.view(element.storage)
        with np.errstate(invalid="ignore"):     # signalling NaNs
            check_equation(element, stored)
            check_error_bound(element, stored)

    check()


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
def test_any_numbers(element):
    @settings(max_examples=300)
    @given(hnp.arrays(np.float64, st.integers(1, 70), elements=st.floats(-6e4, 6e4)), st.integers(-130, 0))
    def check(x, exponent):
        stored = element.store((x * 2.0**exponent).astype(element.real))
        check_equation(element, stored)
        check_error_bound(element, stored)

    check()


def test_refusals():
    assert lib.bhvd_encoded_size(lib.BHVD_CODEC_MINMAX_UINT8, lib.BHVD_INT32, 10, ffi.NULL) == 0
    buffer = np.zeros(64, np.uint8)
    p = ffi.from_buffer(buffer, require_writable=True)
    assert lib.bhvd_encode(lib.BHVD_CODEC_MINMAX_UINT8, lib.BHVD_INT32, p, p, 1, ffi.NULL) == lib.BHVD_ERR_UNSUPPORTED
    assert lib.bhvd_encode(lib.BHVD_CODEC_NONE, lib.BHVD_FLOAT32, p, p, 1, ffi.NULL) == lib.BHVD_ERR_UNSUPPORTED
    assert lib.bhvd_decode(lib.BHVD_CODEC_MINMAX_UINT8, lib.BHVD_FLOAT32, p, p, 1, ffi.NULL) == lib.BHVD_ERR_ARGUMENT
