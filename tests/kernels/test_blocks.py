"""Group-wise codecs against the equations in NumPy and against hand-computed bytes.

    L = 127 (block8), 7 (block4), 448 (float8)      t = max |x| / L     s = 1 / t
    block8, block4    q = sign(x) min(round(|x| s), L)    x' = q t
    float8            c = float8(x s), e4m3               x' = c t

t and s in float64, rounded once; t >= 2^-126 (float64: 2^-1022) unless 0. The e4m3 type is from ml_dtypes.
"""
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import elements
from codec_random import uniform
from elements import BFLOAT16, ELEMENTS, FLOAT16, FLOAT32, FLOAT64, ffi, lib

LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": np.finfo(np.float32).max,
           "float64": np.finfo(np.float64).max}
E4M3 = ml_dtypes.float8_e4m3fn
LEVELS = {"block8": 127, "block4": 7, "float8": 448}
SIZES = (64, 128, 256, 512)


class Blocks(NamedTuple):
    """A codec and its options."""

    name: str
    size: int = 256
    stochastic: bool = False

    @property
    def number(self):
        return getattr(lib, f"BHVD_CODEC_{self.name.upper()}")

    @property
    def bits(self):
        return 4 if self.name == "block4" else 8

    def layout(self, element, count):
        """(offset of the codes, total size)."""
        scales = padded(-(-count // self.size) * np.dtype(element.real).itemsize)
        return 32 + scales, 32 + scales + padded(count if self.bits == 8 else -(-count // 32) * 16)

    def encode(self, element, stored, seed=1):
        return elements.encode(self.number, element, stored, self.size, seed, self.stochastic)

    def decode(self, element, encoded, count):
        return elements.decode(self.number, element, encoded, count, self.size)


CODECS = [Blocks(name, 128, stochastic) for name in LEVELS for stochastic in (False, True)
          if not (stochastic and name == "float8")]


def padded(nbytes):
    return (nbytes + 31) // 32 * 32


def rounded(codec, r, u):
    return np.floor(r + u) if codec.stochastic else np.rint(r)


def steps(element, t):
    """(t, s) in the type of the computation."""
    t = max(np.float64(t), 1 / np.float64(element.scale_max))
    return element.real(t), element.real(1 / t)


def float8_codes(y):
    """y rounded to nearest even. ml_dtypes would round float64 twice, through float32."""
    if y.dtype == np.float32:
        return y.astype(E4M3).view(np.uint8)
    numbers = np.arange(128, dtype=np.uint8).view(E4M3).astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    above = np.clip(np.searchsorted(numbers, np.abs(y)), 1, numbers.size - 1)
    between = np.abs(y) - numbers[above - 1] - (numbers[above] - np.abs(y))     # negative: closer to the lower one
    code = above - (between < 0) - ((between == 0) & (above % 2 == 1))
    return (code | np.signbit(y) * 128).astype(np.uint8)


def encode_block(codec, element, x, u):
    """(t, codes) of one block."""
    levels = LEVELS[codec.name]
    zeros = np.zeros(x.size, np.uint8)
    if not np.isfinite(x).all():
        return np.nan, zeros
    a = np.abs(x).max()
    if a == 0:
        return 0, zeros
    t, s = steps(element, np.float64(a) / levels)
    if codec.name == "float8":
        return t, float8_codes(x * s)
    q = np.sign(x) * np.minimum(rounded(codec, np.abs(x) * s, u), levels)
    return t, q.astype(np.int8).view(np.uint8)


def encode_by_equation(codec, element, stored, seed):
    x, u = element.load(stored), uniform(seed, stored.size)
    codes_at, end = codec.layout(element, x.size)
    parts = [slice(i, i + codec.size) for i in range(0, x.size, codec.size)]
    blocks = [encode_block(codec, element, x[part], u[part]) for part in parts]
    numbers = np.array([t for t, _ in blocks], element.real)
    encoded = np.zeros(end, np.uint8)
    encoded[16], encoded[17] = 1, np.isnan(numbers).any()
    encoded[32:32 + numbers.nbytes] = numbers.view(np.uint8)
    codes = np.concatenate([np.zeros(0, np.uint8), *(codes for _, codes in blocks)])
    if codec.bits == 4:
        low, high = np.append(codes & 15, np.zeros(-codes.size % 32, np.uint8)).reshape(-1, 2, 16).transpose(1, 0, 2)
        codes = (low | high << 4).reshape(-1)
    encoded[codes_at:codes_at + codes.size] = codes
    return encoded


def decode_by_equation(codec, element, encoded, count):
    real = element.real
    codes_at, end = codec.layout(element, count)
    t = np.repeat(encoded[32:codes_at].view(real)[:-(-count // codec.size)], codec.size)[:count]
    codes = encoded[codes_at:end]
    if codec.bits == 4:
        pairs = codes.reshape(-1, 16)
        codes = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)
    codes = codes[:count]
    if codec.name == "float8":
        q = codes.view(E4M3).astype(real)
    else:
        q = (codes.view(np.int8) if codec.bits == 8 else (codes ^ 8).astype(np.int8) - np.int8(8)).astype(real)
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.clip(q * t, -real(LARGEST[element.name]), real(LARGEST[element.name]))
    return element.store(np.where(np.isnan(x), real(np.nan), x).astype(real))


def check_equation(codec, element, stored, seed=1):
    encoded = codec.encode(element, stored, seed)
    np.testing.assert_array_equal(encoded, encode_by_equation(codec, element, stored, seed))
    decoded = codec.decode(element, encoded, stored.size)
    elements.assert_same_bits(decoded, decode_by_equation(codec, element, encoded, stored.size))
    return element.load(decoded)


def golden(*parts):
    """A header, then these parts, each padded."""
    return bytes(16) + b"\1" + bytes(15) + b"".join(bytes(part).ljust(padded(len(part)), b"\0") for part in parts)


def floats(*numbers):
    return np.array(numbers, np.float32).tobytes()


# Elements, then the bytes after the header: scales and codes. The largest element is such that t = 1, unless noted.
GOLDEN = {
    "empty": ("block8", [], [b"", b""]),
    "block8": ("block8", [127, -127, 0, 1.5, 2.5, -2.6], [floats(1), [127, 129, 0, 2, 2, 253]]),
    "block8 zeros": ("block8", [0.0, -0.0], [floats(0), [0, 0]]),
    # t = 2: 14 is 7, -5 is -2.5, rounded to the even -2 (14 in two's complement); element 17 is the byte's high half
    "block4": ("block4", [14, -5, *[0] * 15, 4], [floats(2), [7, 14 | 2 << 4]]),
    # 448 is exponent 15 and mantissa 6; 1 exponent 7; 2^-9 the smallest; 17 lies between 16 and 18, and 16 is even
    "float8": ("float8", [448, -448, 1, 2**-9, 0, 17], [floats(1), [0x7E, 0xFE, 0x38, 0x01, 0, 0x58]]),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_bytes(case):
    name, values, parts = GOLDEN[case]
    codec, stored = Blocks(name, 64), np.array(values, np.float32)
    assert codec.encode(FLOAT32, stored).tobytes() == golden(*map(bytes, parts))
    check_equation(codec, FLOAT32, stored)


def test_golden_bytes_of_random_rounding():
    x = np.append(np.linspace(-3, 3, 15, dtype=np.float32), np.float32(7))
    encoded = Blocks("block8", 64, True).encode(FLOAT32, x * 127 / 7, 42)
    q = encoded[64:80].view(np.int8).tolist()
    assert q == [-55, -47, -38, -32, -24, -16, -8, 0, 8, 16, 23, 31, 39, 47, 55, 127]


def test_every_float8_comes_back():
    """All codes except those that no encoder writes; the block has the format's largest element, so t is 1."""
    values = np.arange(256, dtype=np.uint8).view(E4M3)
    values = values[np.isfinite(values.astype(np.float32))]
    codec = Blocks("float8", 64)
    for begin in range(0, values.size, 63):
        x = np.append(values[begin:begin + 63].astype(np.float32), np.float32(LEVELS["float8"]))
        encoded = codec.encode(FLOAT32, x)
        np.testing.assert_array_equal(encoded[64:64 + x.size - 1], values[begin:begin + 63].view(np.uint8))
        np.testing.assert_array_equal(codec.decode(FLOAT32, encoded, x.size), x)


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 127, 128, 129, 512, 5003])
def test_equation_for_gaussian_data(element, count):
    stored = element.store(np.random.default_rng(count).standard_normal(count).astype(element.real))
    for codec in CODECS:
        for seed in (0, 2**64 - 1):
            check_equation(codec, element, stored, seed)


@pytest.mark.parametrize("size", SIZES)
def test_sizes(size):
    stored = np.random.default_rng(size).standard_cauchy(3 * 512 + 40).astype(np.float32)
    for codec in CODECS:
        check_equation(codec._replace(size=size), FLOAT32, stored)


def error_bound(codec, x):
    """Bound of |x' - x| for one block, without the arithmetic's own rounding."""
    t = np.abs(x).max() / LEVELS[codec.name]
    if codec.name == "float8":
        return np.maximum(2.0**-4 * np.abs(x), 2.0**-10 * t)
    return t if codec.stochastic else t / 2


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
@pytest.mark.parametrize("exponent", [0, -3, -30, 30])
def test_error_bound(element, exponent):
    if element is FLOAT16 and abs(exponent) == 30:
        pytest.skip("beyond float16")
    x = np.random.default_rng(3).standard_normal(1000) * 10.0 ** (exponent + np.arange(1000) // 128 % 3)
    stored = element.store(x.astype(element.real))
    x = element.load(stored).astype(np.float64)
    for codec in CODECS:
        error = np.abs(check_equation(codec, element, stored) - x)
        for i in range(0, x.size, codec.size):
            part = slice(i, i + codec.size)
            rounding = (1e-6 + 2 * element.epsilon) * np.abs(x[part]).max() + (2.0**-24 if element is FLOAT16 else 0)
            assert (error[part] <= error_bound(codec, x[part]) + rounding).all()


def test_a_large_block_costs_no_other_its_precision():
    x = np.random.default_rng(4).standard_normal(1024).astype(np.float32)
    x[:128] *= 1e6
    for codec in CODECS:
        decoded = check_equation(codec, FLOAT32, x)[128:]
        assert np.linalg.norm(decoded - x[128:]) < (0.25 if codec.bits == 4 else 0.06) * np.linalg.norm(x[128:])


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
@pytest.mark.parametrize("poison", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_nonfinite_element_makes_its_block_nan_and_no_other(element, poison):
    for position in (128, 200, 255):
        x = np.linspace(-1, 1, 400).astype(element.real)
        x[position] = poison
        for codec in CODECS:
            is_nan = np.isnan(check_equation(codec, element, element.store(x)))
            assert is_nan[128:256].all() and not is_nan[:128].any() and not is_nan[256:].any()


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
def test_zero_is_exact_and_the_largest_numbers_stay_finite(element):
    largest = LARGEST[element.name]
    for values in ([largest, 0, -largest, largest / 3], [largest, 0, largest], [-largest, 0, -largest / 5],
                   [1e-3, 0, -3]):
        stored = element.store(np.array(values * 50, element.real))
        for codec in CODECS:
            decoded = check_equation(codec, element, stored)
            assert np.isfinite(decoded).all() and (decoded[element.load(stored) == 0] == 0).all()


@pytest.mark.parametrize("element", [FLOAT32, BFLOAT16, FLOAT64], ids=repr)
@pytest.mark.parametrize("exponent", [-10, -36, -44, 30])
def test_the_mean_over_seeds_is_the_element_at_any_scale(element, exponent):
    stored = element.store((np.linspace(-1, 1, 300) * 10.0**exponent).astype(element.real))
    x, seeds = element.load(stored).astype(np.float64), 300
    for codec in (codec for codec in CODECS if codec.stochastic):
        mean = sum(check_equation(codec, element, stored, seed).astype(np.float64) for seed in range(seeds)) / seeds
        level = max(2 * np.abs(x).max() / LEVELS[codec.name], 1 / np.float64(element.scale_max))
        assert (np.abs(mean - x) <= 5 * level * np.sqrt(0.25 / seeds) + 2.0**-7 * np.abs(x)).all()
        assert abs((mean - x).mean()) < level / 30                              # no bias toward zero at the extremes


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
def test_any_bits(element):
    @settings(max_examples=150, deadline=None)
    @given(hnp.arrays(np.dtype(f"u{element.storage.itemsize}"), st.integers(0, 150)), st.sampled_from(CODECS),
           st.sampled_from(SIZES))
    def check(bits, codec, size):
        with np.errstate(invalid="ignore"):     # signalling NaNs
            check_equation(codec._replace(size=size), element, bits.view(element.storage))

    check()


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
def test_any_numbers(element):
    @settings(max_examples=150, deadline=None)
    @given(hnp.arrays(np.float64, st.integers(1, 150), elements=st.floats(-6e4, 6e4)), st.integers(-130, 0),
           st.sampled_from(CODECS))
    def check(x, exponent, codec):
        check_equation(codec, element, element.store((x * 2.0**exponent).astype(element.real)))

    check()


def test_refusals():
    buffer = np.zeros(512, np.uint8)
    p = ffi.from_buffer(buffer, require_writable=True)
    for parameter in (-64.0, 1.0, 32.0, 65.0, 1024.0, np.nan):
        options = ffi.new("struct bhvd_codec_options *", (parameter, 0, 0))
        for name in LEVELS:
            number = Blocks(name).number
            assert lib.bhvd_encoded_size(number, lib.BHVD_FLOAT32, 10, options) == 0
            assert lib.bhvd_encode(number, lib.BHVD_FLOAT32, p, p, 10, options) == lib.BHVD_ERR_ARGUMENT
            assert lib.bhvd_decode(number, lib.BHVD_FLOAT32, p, p, 10, options) == lib.BHVD_ERR_ARGUMENT
