"""Lossy encodings of floating point numbers, for the `codec` of a primitive or an algorithm.

    codec                 bits an element     rounding       D(Q(x))
    minmax_uint8          8                   nearest        one of 256 levels between the chunk's minimum and maximum
    sign, sign_rms        1                   biased         sign(x) times the mean, or the root mean square, of |x|
    block(bits, size)     8 or 4              either         a multiple of max |x| / 127 (/ 7) over `size` elements
    rotated(bits, block)  1, 2, 3 or 4        nearest        a normal's levels of randomly rotated blocks of `block`
                                                             elements: nearly unbiased
    float8(size)          8                   nearest        an e4m3 number times a scale of the block
    float16, bfloat16     16                  nearest        x
    topk(ratio)           64 ratio (float32)  biased         x where |x| is among the largest, else 0
    topk(ratio, bits=2)   10 ratio (at 0.02)  biased         of these, the sign and one of two magnitudes
    float32               32                  none           x: float32 on the path of codes

Use biased codecs with error feedback. Each codec takes float16, bfloat16, float32 and float64 (float32: only that). A
chunk is the data that is encoded at a time. NaN and infinity are never lost: their chunk (block, rotated, float8:
their block; topk of 2 bits: all kept elements) decodes to NaN; topk, float16 and bfloat16 keep them as they are.
Formulas, sources and bytes: native/kernel/<codec>.h or <codec>_kernels.c (float16, bfloat16: half; float8: blocks).
"""
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bagua_hvd.core import native
from bagua_hvd.core.native import ffi, lib
from bagua_hvd.core.vectors import DTYPES, native_order

# What isinstance() takes for arguments, Python's own or NumPy's.
INTEGERS = (int, np.integer)
NUMBERS = (*INTEGERS, float, np.floating)
_ROTATED = tuple(getattr(lib, f"BHVD_CODEC_ROTATED{bits}") for bits in (1, 2, 3, 4))


class Codec(NamedTuple):
    """A lossy encoding.

    name: as above. number: the core's. parameter: ratio or size; 0 if there is none. stochastic: whether a
    block codec rounds at random; only encoding depends on it.
    """

    name: str
    number: int
    parameter: float = 0.0
    stochastic: bool = False

    def options(self, seed: int = 0) -> Any:
        """The native struct bhvd_codec_options. seed: see encode; 0 <= seed < 2^64."""
        return ffi.new("struct bhvd_codec_options *", self.fields(seed))

    def fields(self, seed: int) -> dict[str, Any]:
        """The fields of that struct, by name. TypeError, ValueError: a wrong seed."""
        if not isinstance(seed, INTEGERS):
            raise TypeError(f"seed={seed!r:.100}: expected an integer")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed={seed}: expected 0 <= seed < 2^64")
        return {"parameter": self.parameter, "seed": seed, "stochastic": self.stochastic}

    @property
    def sparse(self) -> bool:
        """Whether most elements decode to 0. Sums over ranks are denser, so they are better not encoded again."""
        return self.name in ("topk", "topk_2bit")

    @property
    def random(self) -> bool:
        """Whether encoding depends on the seed."""
        return self.stochastic or self.number in _ROTATED

    def takes(self, dtype: int) -> bool:
        """Whether it supports elements of the native dtype."""
        return self.encoded_size(dtype, 1) > 0

    def encoded_size(self, dtype: int, count: int) -> int:
        """Bytes of a chunk of `count` elements of the native dtype; 0 if the dtype is not supported."""
        return int(lib.bhvd_encoded_size(self.number, dtype, count, self.options()))

    def bits(self, dtype: int) -> float:
        """Bits of code for each element of a long array of the native dtype, headers included."""
        return 8 * self.encoded_size(dtype, 1 << 20) / (1 << 20)

    def encode(self, array: np.ndarray, seed: int = 0) -> np.ndarray:
        """Encodes a NumPy array as one chunk.

        Args:
            array: float16, float32, float64, or bfloat16 as ml_dtypes defines it; any shape, read in C order.
            seed: for stochastic rounding, or for the rotation; equal seeds give equal bytes.
        Returns:
            uint8, shape (encoded_size,).
        Raises:
            ValueError: the codec does not support the array's dtype. TypeError: not an array.
        """
        array = native_order(self._array(array))
        dtype = self._dtype(array.dtype)
        code: np.ndarray = np.empty(self.encoded_size(dtype, array.size), np.uint8)
        self._call(lib.bhvd_encode, dtype, code, np.ascontiguousarray(array), array.size, seed)
        return code

    def decode(self, code: Any, dtype: Any, count: int) -> np.ndarray:
        """Decodes the result of encode() for `count` elements of the NumPy dtype; returns an array of shape (count,).

        Raises:
            ValueError: these are not the bytes of such a chunk. TypeError: `code` is not an array, or `count` not an
                integer of 0 or more.
        """
        if not isinstance(count, INTEGERS) or count < 0:
            raise TypeError(f"count={count!r:.100}: expected an integer of 0 or more")
        array: np.ndarray = np.empty(count, dtype)
        native_dtype = self._dtype(array.dtype)
        self._check_size(code, native_dtype, count)
        self._call(lib.bhvd_decode, native_dtype, array, code, count)
        return array

    def decode_add(self, total: np.ndarray, code: Any, dtype: Any) -> None:
        """Adds the decoded elements, of the NumPy dtype, to `total`, a contiguous float32 array; in float32.

        Raises:
            ValueError: `total` is not such an array, or `code` does not hold total.size elements. TypeError: not
                arrays.
        """
        if self._array(total).dtype != np.float32 or not total.flags.c_contiguous:
            raise ValueError("decode_add adds to a contiguous float32 array: make a copy that is one")
        native_dtype = self._dtype(np.dtype(dtype))
        self._check_size(code, native_dtype, total.size)
        self._call(lib.bhvd_decode_add, native_dtype, total, code, total.size)

    def _array(self, array: Any) -> np.ndarray:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"codec {self.name} takes a NumPy array, not {type(array).__name__}")
        return array

    def _dtype(self, dtype: np.dtype) -> int:
        number: int | None = DTYPES.get(dtype.name) if dtype.isnative else None
        if number is None or not self.takes(number):
            taken = ", ".join(name for name, number in DTYPES.items() if self.takes(number))
            raise ValueError(f"codec {self.name} does not take dtype {dtype}: convert to one of {taken}")
        return number

    def _check_size(self, code: Any, dtype: int, count: int) -> None:
        expected = self.encoded_size(dtype, count)
        if not self._array(code).flags.c_contiguous:
            raise ValueError(f"codec {self.name} decodes a contiguous array: make a copy that is one")
        if code.nbytes != expected:
            raise ValueError(f"{count} elements encoded by {self.name} are {expected} bytes, not {code.nbytes}: pass "
                             "the dtype and count that were encoded")

    def _call(self, function: Callable[..., int], dtype: int, dst: Any, src: Any, count: int, seed: int = 0) -> None:
        def address(array: Any) -> Any:
            return ffi.cast("void *", array.ctypes.data)

        status = function(self.number, dtype, address(dst), address(src), count, self.options(seed))
        if status != native.OK:
            native.raise_failure(native.Failure(status, f"these are not bytes that codec {self.name} has encoded"))


def topk(ratio: float = 0.01, bits: int | None = None) -> Codec:
    """The largest max(1, ceil(ratio d)) of d elements, 0 < ratio <= 1.

    Args:
        bits: None: exact values, with 32-bit indices. 2: signs, and one of two magnitudes that the whole chunk shares,
            with indices of as many bits as they need: 8 at a ratio of 0.02.
    Raises:
        ValueError: an argument has another value.
    """
    if not _is_number(ratio) or not 0 < ratio <= 1:
        raise ValueError(f"topk(ratio={ratio!r}): expected a number above 0 and at most 1")
    if bits not in (None, 2):
        raise ValueError(f"topk(bits={bits!r}): expected 2 or None")
    name = "topk" if bits is None else "topk_2bit"
    return Codec(name, getattr(lib, f"BHVD_CODEC_{name.upper()}"), float(ratio))


def block(bits: int = 8, size: int = 256, stochastic: bool = False) -> Codec:
    """Blocks of `size` elements, each with its own float32 scale: levels symmetric about 0, up to max |x|.

    Args:
        bits: per element, 8 or 4.
        size: 64, 128, 256 or 512.
        stochastic: round at random, unbiased; else to nearest.
    Raises:
        ValueError: an argument has another value.
    """
    if bits not in (8, 4):
        raise ValueError(f"block(bits={bits!r}): expected 8 or 4")
    number = getattr(lib, f"BHVD_CODEC_BLOCK{bits}")
    return Codec(f"block{bits}", number, _size("block(size", size, 64, 512), bool(stochastic))


def rotated(bits: int = 2, block: int = 512) -> Codec:
    """Blocks of `block` elements, randomly rotated, each with its own float32 scale.

    The rotation makes the values of any block nearly normal, so few levels suffice. No state is kept between steps.
    Zeros do not stay exactly 0, unless a whole block is 0. float64 is encoded as float32.

    Args:
        bits: per element, 1, 2, 3 or 4.
        block: 256, 512, 1024 or 2048.
    Raises:
        ValueError: an argument has another value.
    """
    if bits not in (1, 2, 3, 4) or isinstance(bits, bool):
        raise ValueError(f"rotated(bits={bits!r}): expected 1, 2, 3 or 4")
    number = getattr(lib, f"BHVD_CODEC_ROTATED{int(bits)}")
    return Codec(f"rotated{int(bits)}", number, _size("rotated(block", block, 256, 2048))


def float8(size: int = 256) -> Codec:
    """e4m3 floats (4 exponent bits, 3 mantissa bits) in blocks of `size` elements, scaled to a maximum of 448.

    Args:
        size: 64, 128, 256 or 512.
    Raises:
        ValueError: size has another value.
    """
    return Codec("float8", lib.BHVD_CODEC_FLOAT8, _size("float8(size", size, 64, 512))


def _is_number(value: Any) -> bool:
    return isinstance(value, NUMBERS) and not isinstance(value, bool)


def _size(argument: str, size: int, smallest: int, largest: int) -> float:
    sizes = [smallest << k for k in range((largest // smallest).bit_length())]
    if size not in sizes:
        raise ValueError(f"{argument}={size!r}): expected {', '.join(map(str, sizes[:-1]))} or {largest}")
    return float(size)


minmax_uint8 = Codec("minmax_uint8", lib.BHVD_CODEC_MINMAX_UINT8)
sign = Codec("sign", lib.BHVD_CODEC_SIGN)
sign_rms = Codec("sign_rms", lib.BHVD_CODEC_SIGN_RMS)
float16 = Codec("float16", lib.BHVD_CODEC_FLOAT16)
bfloat16 = Codec("bfloat16", lib.BHVD_CODEC_BFLOAT16)
float32 = Codec("float32", lib.BHVD_CODEC_FLOAT32)
