"""Lossy encodings of floating point numbers; the bytes are defined in native/kernel/<name>.h.

    minmax_uint8    one byte: the level between minimum and maximum of the chunk
    sign            one bit, and the mean of |x|
    sign_rms        one bit, and the root of the mean of x^2
    ternary         two bits: -s, 0 or s = max |x|, drawn so that the mean is right
    qsgd(levels)    one byte: the level of |x| to the norm of 512 elements, drawn so that the mean is right
    topk(ratio)     the largest elements and where they are
    float16, bfloat16, float32
"""
from typing import NamedTuple

from bagua_hvd.common import native
from bagua_hvd.common.native import ffi


class Codec(NamedTuple):
    """A lossy encoding.

    name: its file in native/kernel. number: the core's. parameter: of struct bhvd_codec_options.
    """

    name: str
    number: int
    parameter: float = 0.0

    def takes(self, dtype):
        """Whether it encodes elements of the native dtype."""
        return native.lib.bhvd_encoded_size(self.number, dtype, 1, ffi.NULL) > 0


minmax_uint8 = Codec("minmax_uint8", native.lib.BHVD_CODEC_MINMAX_UINT8)
sign = Codec("sign", native.lib.BHVD_CODEC_SIGN)
sign_rms = Codec("sign_rms", native.lib.BHVD_CODEC_SIGN_RMS)
ternary = Codec("ternary", native.lib.BHVD_CODEC_TERNARY)
float16 = Codec("float16", native.lib.BHVD_CODEC_FLOAT16)
bfloat16 = Codec("bfloat16", native.lib.BHVD_CODEC_BFLOAT16)
float32 = Codec("float32", native.lib.BHVD_CODEC_FLOAT32)


def qsgd(levels=127):
    """Stochastic quantization to `levels` levels, 1 to 127.

    Raises:
        ValueError: levels is something else.
    """
    if int(levels) != levels or not 1 <= levels <= 127:
        raise ValueError(f"qsgd(levels={levels!r}): expected an integer from 1 to 127")
    return Codec("qsgd", native.lib.BHVD_CODEC_QSGD, float(levels))


def topk(ratio=0.01):
    """The share `ratio` of the elements, the largest ones; at least one.

    Raises:
        ValueError: ratio does not lie above 0, or exceeds 1.
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"topk(ratio={ratio!r}): expected 0 < ratio <= 1")
    return Codec("topk", native.lib.BHVD_CODEC_TOPK, float(ratio))
