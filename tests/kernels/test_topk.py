"""Codec topk against a sort in NumPy and against bytes worked out by hand.

    k = max(1, ceil(p d));  the k largest |x|, of equal ones those of lower index, every NaN larger than all numbers
"""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import elements
from elements import BFLOAT16, ELEMENTS, FLOAT16, FLOAT32, FLOAT64, assert_same_bits, ffi, lib

TOPK = lib.BHVD_CODEC_TOPK


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


def check_sort(element, stored, share):
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
def test_any_bits(element):
    @settings(max_examples=200)
    @given(hnp.arrays(np.dtype(f"u{element.storage.itemsize}"), st.integers(1, 100)), st.floats(1e-6, 1))
    def check(bits, share):
        with np.errstate(invalid="ignore"):     # signalling NaNs
            check_sort(element, bits.view(element.storage), share)

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
