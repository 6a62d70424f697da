"""Inputs for tests that launch kernels of native/device/kernels.cu: values, and vectors in chunks and segments."""
from typing import NamedTuple

import numpy as np

from bagua_hvd.core.native import lib
from elements import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from low_precision import Codec, chunks

TYPES = {"f32": FLOAT32, "f64": FLOAT64, "f16": FLOAT16, "bf16": BFLOAT16}


def values(type, count, kind, offset=0):
    """An array of `count` elements, `offset` elements after an aligned address."""
    rng = np.random.default_rng([count, len(kind)])
    x = rng.standard_normal(count) * {"tiny": 1e-41, "huge": 1e37}.get(kind, 3)
    if kind == "constant":
        x[:] = -2.5
    if kind == "zeros":
        x = np.where(np.arange(count) % 2, 0.0, -0.0)
    if kind in ("nan", "inf") and count:
        x[rng.integers(count)] = {"nan": np.nan, "inf": -np.inf}[kind]
    if kind == "offset":
        x = x / 1000 + 5
    element = TYPES[type]
    memory = np.empty(64 + (count + offset) * element.storage.itemsize, np.uint8)
    begin = -memory.ctypes.data % 64
    out = memory[begin:len(memory) - (64 - begin)].view(element.storage)[offset:]
    out[:] = element.store(x)
    return out


KINDS = ["normal", "nan", "inf", "tiny", "huge", "constant", "zeros", "offset"]


class Cut(NamedTuple):
    """A vector in chunks and segments (native/kernel/segments.h), and the layout of their codes."""

    codec: Codec
    type: str
    count: int
    chunks: int
    segment: int

    @property
    def strides(self):
        """Distances in bytes of consecutive chunks' codes and of consecutive segments' codes."""
        size = self.codec.size(self.dtype, min(self.longest, self.segment))
        return -(-self.longest // self.segment) * size, size

    @property
    def longest(self):
        return -(-self.count // self.chunks)

    @property
    def dtype(self):
        return TYPES[self.type].name

    def parts(self):
        """(slice of the vector, offset of the code) of every nonempty segment."""
        chunk_stride, segment_stride = self.strides
        for k, (begin, end) in enumerate(chunks(self.count, self.chunks)):
            for s, at in enumerate(range(begin, end, self.segment)):
                yield slice(at, min(at + self.segment, end)), k * chunk_stride + s * segment_stride

    def grid(self, per_segment):
        return self.chunks * -(-self.longest // self.segment) * per_segment


CODED = [Codec("minmax_uint8", lib.BHVD_CODEC_MINMAX_UINT8), Codec("sign", lib.BHVD_CODEC_SIGN),
         Codec("sign_rms", lib.BHVD_CODEC_SIGN_RMS),
         Codec("rotated1", lib.BHVD_CODEC_ROTATED1, 256), Codec("rotated2", lib.BHVD_CODEC_ROTATED2),
         Codec("rotated3", lib.BHVD_CODEC_ROTATED3, 2048), Codec("rotated4", lib.BHVD_CODEC_ROTATED4, 1024)]
SEED, FIRST = 99, 1000


def kernel_of(codec):
    """The codec's name in kernels.cu."""
    return "rotated" if codec.rotates else codec.name.removesuffix("_rms")


def option_of(codec):
    """The extra arguments of the codec's kernels."""
    if codec.rotates:
        return codec.block << 8 | codec.bits
    return int(codec.name == "sign_rms")


def launch_encode(launch, cut, src, per_segment=2, threads=32):
    """The codes of all segments, made by successive launches of the codec's kernels."""
    chunk_stride, segment_stride = cut.strides
    kernel = kernel_of(cut.codec)
    codes = np.full(cut.chunks * chunk_stride, 0xAB, np.uint8)
    ranges = np.zeros(max(cut.grid(per_segment) * 24, cut.grid(-(-cut.segment // 512)) * 8), np.uint8)

    def run(step, per_segment):
        launch(f"{step}_{cut.type}", cut.grid(per_segment), threads, codes, chunk_stride, segment_stride, src,
               cut.count, cut.chunks, cut.segment, per_segment, ranges, option_of(cut.codec), SEED, FIRST)

    if kernel == "minmax_uint8":
        run("minmax_uint8_ranges", per_segment)
    run(f"{kernel}_encode", per_segment)
    if kernel in ("sign", "rotated"):
        run(f"{kernel}_header", 1)
    return codes
