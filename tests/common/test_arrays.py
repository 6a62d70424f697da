"""NumPy arrays as tensors, and tensors as one flat array."""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_hvd.core import native, vectors
from floats import FLOATS, assert_same_bits, load, store, unaligned
from world import DTYPES, storage, view


@given(st.lists(st.tuples(st.sampled_from(FLOATS), st.integers(0, 70)), min_size=1, max_size=6), st.integers(0, 100))
def test_pack_and_unpack_round_to_nearest(members, seed):
    random = np.random.default_rng(seed)
    exact = [random.standard_normal(count) * 1e3 for _, count in members]
    tensors = [unaligned(store(dtype, x)) for (dtype, _), x in zip(members, exact, strict=True)]
    outs = [np.zeros_like(x) for x in tensors]
    views = [view(x, dtype, out) for x, out, (dtype, _) in zip(tensors, outs, members, strict=True)]
    flat = np.full(sum(x.size for x in tensors), 7, np.float32)
    vectors.pack(views, flat)
    expected = [load(dtype, x).astype(np.float32) for x, (dtype, _) in zip(tensors, members, strict=True)]
    assert_same_bits(flat, np.concatenate(expected))
    flat *= np.float32(1 / 3)
    vectors.unpack(views, flat)
    for out, x, (dtype, _) in zip(outs, expected, members, strict=True):
        assert_same_bits(out, store(dtype, x * np.float32(1 / 3)))


@given(st.lists(st.tuples(st.sampled_from(FLOATS), st.sampled_from([0, 1, 70, 3000])), min_size=1, max_size=6),
       st.integers(0, 100))
def test_unpack_add_rounds_once(members, seed):
    random = np.random.default_rng(seed)
    tensors = [unaligned(store(dtype, random.standard_normal(count) * 1e3)) for dtype, count in members]
    wanted = [load(dtype, x).astype(np.float32) for x, (dtype, _) in zip(tensors, members, strict=True)]
    deltas = [random.standard_normal(x.size).astype(np.float32) for x in tensors]
    vectors.unpack_add([view(x, dtype, "in place") for x, (dtype, _) in zip(tensors, members, strict=True)],
                      np.concatenate(deltas))
    for x, before, delta, (dtype, _) in zip(tensors, wanted, deltas, members, strict=True):
        assert_same_bits(x, store(dtype, before + delta))


def test_unpack_add_of_float64_and_what_it_refuses():
    x = np.array([1.0, 1e300])
    vectors.unpack_add([view(x, "float64", "in place")], np.array([2.0**-50, 1e300]))
    assert list(x) == [1 + 2.0**-50, 2e300]
    numbers = np.zeros(4, np.int32)
    with pytest.raises(ValueError, match="int32 cannot be one flat array of int32"):
        vectors.unpack_add([view(numbers, "int32", "in place")], np.ones(4, np.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_flat_array_of_the_tensors_own_dtype_is_a_copy(dtype):
    first, second = (np.arange(5 * k, 5 * k + 5).astype(storage(dtype)) for k in (0, 1))
    flat = np.zeros(10, storage(dtype))
    if dtype == "bfloat16":
        flat = flat.view(pytest.importorskip("ml_dtypes", reason="NumPy's bfloat16 is in it").bfloat16)
    views = [view(first, dtype, "in place"), view(second, dtype, "in place")]
    vectors.pack(views, flat)
    assert_same_bits(flat.view(storage(dtype)), np.concatenate([first, second]))
    flat.view(storage(dtype))[:] = flat.view(storage(dtype))[::-1].copy()
    vectors.unpack(views, flat)
    assert_same_bits(first, np.arange(9, 4, -1).astype(storage(dtype)))


def test_pack_refuses_what_does_not_fit():
    numbers, floats = np.zeros(4, np.int32), np.zeros(4, np.float64)
    with pytest.raises(ValueError, match="int32 cannot be one flat array of float32"):
        vectors.pack([view(numbers, "int32")], np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="float32, float64 cannot be one flat array of float64"):
        vectors.pack([view(floats, "float64"), view(np.zeros(4, np.float32), "float32")], np.zeros(8))
    for wrong in (np.zeros(5), np.zeros((2, 2)), np.zeros(3)):
        with pytest.raises(ValueError, match="do not fit a flat array"):
            vectors.unpack([view(floats, "float64", "in place")], wrong)


def test_array_view_is_the_arrays_memory():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    out = np.empty_like(array)
    assert vectors.array_view(array)[:4] == (array.ctypes.data, array.ctypes.data, (2, 3), native.FLOAT32)
    assert vectors.array_view(array, out)[:4] == (array.ctypes.data, out.ctypes.data, (2, 3), native.FLOAT32)


def test_array_view_refuses_what_cannot_travel():
    array, frozen = np.zeros((4, 4), np.float32), np.zeros(4, np.float32)
    frozen.flags.writeable = False
    for wrong in (array[:, 0], array.T[1:], frozen):
        with pytest.raises(ValueError, match="must be contiguous"):
            vectors.array_view(wrong)
    for dtype in (np.complex64, np.uint64, ">f4"):
        with pytest.raises(ValueError, match="cannot be sent"):
            vectors.array_view(np.zeros(4, dtype))
    for out in (np.zeros(4, np.float32), np.zeros((4, 4))):
        with pytest.raises(ValueError, match="but the array"):
            vectors.array_view(array, out)
    vectors.array_view(frozen, np.zeros(4, np.float32))      # read-only
