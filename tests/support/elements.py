"""The floating point element types of the codecs, and the core's codec functions on NumPy arrays."""
import numpy as np

from bagua_hvd import _native

lib, ffi = _native.lib, _native.ffi


class Element:
    """An element type: its bytes (`storage`), and the type of the codec's arithmetic (`real`)."""

    def __init__(self, name, dtype, storage, real, epsilon, scale_max):
        self.name, self.dtype, self.storage, self.real = name, dtype, np.dtype(storage), real
        self.epsilon, self.scale_max = epsilon, scale_max

    def __repr__(self):
        return self.name

    def store(self, values):
        """Values rounded to the type, in the array that C sees."""
        with np.errstate(over="ignore"):
            if self.name != "bfloat16":
                return np.asarray(values, self.storage)
            bits = np.asarray(values, np.float32).view(np.uint32)
        nearest = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(bits.view(np.float32)), bits >> 16 | 0x40, nearest).astype(np.uint16)

    def load(self, stored):
        """The stored elements as numbers of type `real`, exactly."""
        if self.name == "bfloat16":
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(self.real)


FLOAT32 = Element("float32", lib.BHVD_FLOAT32, np.float32, np.float32, 2.0**-24, 2.0**126)
FLOAT16 = Element("float16", lib.BHVD_FLOAT16, np.float16, np.float32, 2.0**-11, 2.0**126)
BFLOAT16 = Element("bfloat16", lib.BHVD_BFLOAT16, np.uint16, np.float32, 2.0**-8, 2.0**126)
FLOAT64 = Element("float64", lib.BHVD_FLOAT64, np.float64, np.float64, 2.0**-53, 2.0**1022)
ELEMENTS = [FLOAT32, FLOAT16, BFLOAT16, FLOAT64]


def encode(codec, element, stored, parameter=0.0, seed=0, stochastic=False):
    """The bytes of `stored`, an array of element.storage, encoded by the native codec number."""
    stored = np.ascontiguousarray(stored)
    options = ffi.new("struct bhvd_codec_options *", (parameter, seed, stochastic))
    encoded = np.full(lib.bhvd_encoded_size(codec, element.dtype, stored.size, options), 0xA5, np.uint8)
    dst, src = ffi.from_buffer(encoded, require_writable=True), ffi.from_buffer(stored)
    assert lib.bhvd_encode(codec, element.dtype, dst, src, stored.size, options) == lib.BHVD_OK
    return encoded


def decode(codec, element, encoded, count, parameter=0.0):
    stored = np.empty(count, element.storage)
    options = ffi.new("struct bhvd_codec_options *", (parameter, 0))
    dst, src = ffi.from_buffer(stored, require_writable=True), ffi.from_buffer(encoded)
    assert lib.bhvd_decode(codec, element.dtype, dst, src, count, options) == lib.BHVD_OK
    return stored


def assert_same_bits(actual, expected):
    np.testing.assert_array_equal(np.ascontiguousarray(actual).view(np.uint8),
                                  np.ascontiguousarray(expected).view(np.uint8))
