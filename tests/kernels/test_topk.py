"""Codecs topk and topk_2bit against a sort in NumPy and against hand-computed bytes.

    k = max(1, ceil(p d));  the k largest |x|, ties by lower index; NaN counts as larger than all numbers
    2 bits: sign(x) hi if |x| >= t, else sign(x) lo;  t, hi, lo: means of |x| of the kept, of those >= t, of the rest
"""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import elements
from elements import BFLOAT16, ELEMENTS, FLOAT16, FLOAT32, FLOAT64, assert_same_bits, ffi, lib

TOPK, TWO_BITS = lib.BHVD_CODEC_TOPK, lib.BHVD_CODEC_TOPK_2BIT


def chosen_by_sort(x, share):
    magnitudes = np.where(np.isnan(x), np.inf, np.abs(x).astype(np.float64))
    order = np.lexsort((np.arange(x.size), -magnitudes, ~np.isnan(x)))
    kept = min(max(1, int(np.ceil(np.float64(share) * x.size))), x.size)
    return np.sort(order[:kept]).astype(np.uint32)


def encode_by_sort(element, stored, share):
    x = element.load(stored)
    kept = chosen_by_sort(x, share)
    header = np.zeros(32, np.uint8)
    header[16], header[17] = 1, not np.isfinite(x[kept]).all()
    return np.concatenate([header, kept.view(np.uint8), stored[kept].view(np.uint8)])


def bits(values, width=1):
    """The values' lowest `width` bits, packed from the lowest bit on."""
    each = np.asarray(values, np.uint64)[:, None] >> np.arange(width, dtype=np.uint64) & np.uint64(1)
    return np.packbits(each.astype(np.uint8).ravel(), bitorder="little")


def two_bits_by_sort(element, stored, share):
    """(the code, the decoded elements)."""
    x = element.load(stored)
    kept = chosen_by_sort(x, share)
    magnitudes = np.abs(x[kept]).astype(np.float64)
    parts = magnitudes * 2.0**-32
    is_high = parts >= np.cumsum(parts)[-1] / len(kept)         # cumsum adds sequentially

    def level(chosen):
        if not np.isfinite(magnitudes).all():
            return np.array([np.nan])
        if not chosen.any():
            return np.zeros(1)
        mean = min(np.cumsum(parts[chosen])[-1] / chosen.sum() * 2.0**32, magnitudes.max())
        return np.array([mean], np.float64 if element is FLOAT64 else np.float32)

    levels = [element.store(level(chosen).astype(element.real)) for chosen in (~is_high, is_high)]
    header = np.zeros(32, np.uint8)
    for at, stored_level in zip((0, 8), levels, strict=True):
        header[at:at + element.storage.itemsize] = stored_level.view(np.uint8)
    header[16], header[17] = 1, not np.isfinite(magnitudes).all()
    sign_bit = stored.view(f"u{element.storage.itemsize}")[kept] >> (8 * element.storage.itemsize - 1)
    low_bits = int(np.floor(np.log2(x.size // len(kept))))
    places = np.zeros(len(kept) + (x.size - 1 >> low_bits), np.uint8)
    places[(kept >> low_bits) + np.arange(len(kept))] = 1
    codes = 2 * sign_bit.astype(np.uint64) + is_high
    code = np.concatenate([header, bits(places), bits(kept, low_bits), bits(codes, 2)])
    expected = np.zeros(stored.size, element.storage)
    values = np.where(is_high, levels[1], levels[0])
    sign = sign_bit << (8 * element.storage.itemsize - 1)
    expected[kept] = (values.view(sign.dtype) | sign).view(element.storage)
    return code, expected


def check_sort(element, stored, share):
    code, expected = two_bits_by_sort(element, stored, share)
    encoded = elements.encode(TWO_BITS, element, stored, share)
    np.testing.assert_array_equal(encoded, code)
    assert_same_bits(elements.decode(TWO_BITS, element, encoded, stored.size, share), expected)
    encoded = elements.encode(TOPK, element, stored, share)
    np.testing.assert_array_equal(encoded, encode_by_sort(element, stored, share))
    expected = np.zeros(stored.size, element.storage)
    kept = chosen_by_sort(element.load(stored), share)
    expected[kept] = stored[kept]
    assert_same_bits(elements.decode(TOPK, element, encoded, stored.size, share), expected)


@pytest.mark.parametrize("element, values, share, flags, body", [
    (FLOAT32, [], 0.5, 0, ""),
    (FLOAT32, [1.0, -3.0, 2.0, 0.0], 0.5, 0, "01000000 02000000 000040c0 00000040"),
    (FLOAT32, [1.0, -1.0, 1.0], 0.5, 0, "00000000 01000000 0000803f 000080bf"),              # ties: the lower indices
    (FLOAT32, [np.inf, np.nan, 1.0], 0.3, 1, "01000000 0000c07f"),
    (FLOAT32, [0.0, -0.0], 0.001, 0, "00000000 00000000"),
    (FLOAT16, [1.0, 2.0], 1.0, 0, "00000000 01000000 003c 0040"),
    (BFLOAT16, [1.0, 2.0], 0.5, 0, "01000000 0040"),
    (FLOAT64, [1.0, 2.0], 0.5, 0, "01000000 0000000000000040"),
])
def test_golden_bytes(element, values, share, flags, body):
    stored = element.store(np.array(values, element.real))
    header = bytes(16) + bytes([1, flags]) + bytes(14)
    assert elements.encode(TOPK, element, stored, share).tobytes() == header + bytes.fromhex(body)


@pytest.mark.parametrize("element, values, share, header, body", [
    # The second and third of four: one low bit; of three bits (1 >> 1) + 0 and (2 >> 1) + 1 are set.
    (FLOAT32, [1.0, -3.0, 2.0, 0.0], 0.5, "00000040 00000000 00004040 00000000 01 00", "05 01 03"),
    (FLOAT32, [1.0, -1.0, 1.0], 0.5, "00000000 00000000 0000803f 00000000 01 00", "05 0d"),      # all equal the mean
    (FLOAT32, [np.inf, -np.nan, 1.0], 0.5, "0000c07f 00000000 0000c07f 00000000 01 01", "05 08"),
    (FLOAT16, [1.0, 2.0], 1.0, "003c0000 00000000 00400000 00000000 01 00", "05 04"),
    (FLOAT64, [1.0, 2.0], 0.5, "00000000 00000000 00000000 00000040 01 00", "01 01 01"),
])
def test_golden_bytes_of_two_bits(element, values, share, header, body):
    stored = element.store(np.array(values, element.real))
    code = elements.encode(TWO_BITS, element, stored, share).tobytes()
    assert code == bytes.fromhex(header) + bytes(14) + bytes.fromhex(body), code.hex()


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
@pytest.mark.parametrize("count", [1, 31, 32, 33, 5003])
@pytest.mark.parametrize("share", [1e-9, 0.01, 0.1, 0.5, 0.999, 1.0])
def test_gaussian_data(element, count, share):
    stored = element.store(np.random.default_rng(count).standard_normal(count).astype(element.real))
    check_sort(element, stored, share)


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_many_ties_and_nans(element, share):
    rng = np.random.default_rng(5)
    x = rng.choice([0.0, -0.0, 1.0, -1.0, 2.0, np.inf, -np.inf, np.nan, -np.nan], 1000, p=[0.3, 0.3] + [0.4 / 7] * 7)
    check_sort(element, element.store(x.astype(element.real)), share)


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
@pytest.mark.parametrize("kind", ["normal", "zeros", "ties", "above the sample", "in the sample"])
def test_few_of_many(element, kind):
    """From 32,768 elements on, a sample of every 16th selects the candidates; the sample may be unlike the rest."""
    count = 65_536 + 17
    x = np.random.default_rng(count).standard_normal(count)
    if kind == "zeros":
        x *= np.arange(count) % 1000 == 3
    elif kind == "ties":
        x = np.round(x)
    elif kind == "above the sample":
        x[np.arange(count) % 16 == 0] *= 1e-3
    elif kind == "in the sample":
        x[np.arange(count) % 16 != 0] *= 1e-3
    x[[5, 40_000]] = np.nan, -np.inf
    for share in (1e-9, 0.01, 0.05, 0.2):
        check_sort(element, element.store(x.astype(element.real)), share)


@pytest.mark.parametrize("element", ELEMENTS, ids=repr)
def test_any_bits(element):
    @settings(max_examples=200)
    @given(hnp.arrays(np.dtype(f"u{element.storage.itemsize}"), st.integers(1, 100)), st.floats(1e-6, 1))
    def check(stored, share):
        with np.errstate(invalid="ignore", under="ignore"):     # signalling NaNs
            check_sort(element, stored.view(element.storage), share)

    check()


def test_indices_beyond_the_chunk_are_ignored_and_equal_ones_are_each_added():
    code = elements.encode(TOPK, FLOAT32, np.array([1.0, 2.0, 3.0, 4.0], np.float32), 1.0)
    code[32:48].view(np.uint32)[:] = [4, 2, 2, 2**32 - 1]
    np.testing.assert_array_equal(elements.decode(TOPK, FLOAT32, code, 4, 1.0), [0, 0, 3, 0])
    total = np.full(4, 10, np.float32)
    options = ffi.new("struct bhvd_codec_options *", (1.0, 0))
    pointers = ffi.from_buffer("float[]", total, require_writable=True), ffi.from_buffer(code)
    assert lib.bhvd_decode_add(TOPK, lib.BHVD_FLOAT32, *pointers, 4, options) == lib.BHVD_OK
    np.testing.assert_array_equal(total, [10, 10, 15, 10])


def test_places_that_are_none_are_ignored():
    """For any bytes, at most k elements are written, and none beyond the chunk."""
    x = np.arange(1, 101, dtype=np.float32)
    code = elements.encode(TWO_BITS, FLOAT32, x, 0.1)
    code[32:] = 0xff                                            # ten bits in a row are set, with all low bits
    decoded = elements.decode(TWO_BITS, FLOAT32, code, 100, 0.1)
    assert np.flatnonzero(decoded).tolist() == [7] and decoded[7] < 0
    code[32:] = 0
    assert not elements.decode(TWO_BITS, FLOAT32, code, 100, 0.1).any()


def test_two_bits_are_nearer_than_one_magnitude():
    x = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    decoded = elements.decode(TWO_BITS, FLOAT32, elements.encode(TWO_BITS, FLOAT32, x, 0.02), x.size, 0.02)
    kept = decoded != 0
    one = np.abs(x[kept]).mean() * np.sign(x[kept])
    assert np.linalg.norm((decoded - x)[kept]) < 0.65 * np.linalg.norm(one - x[kept])
    assert len(elements.encode(TWO_BITS, FLOAT32, x, 0.02)) < 0.16 * len(elements.encode(TOPK, FLOAT32, x, 0.02))
