"""The low-precision primitives, transcribed in NumPy. Q and D are the core's codecs, which have tests of their own."""
from typing import NamedTuple

import numpy as np
from bagua_hvd._native import ffi, lib

from floats import load, store
from world import DTYPES

F = np.float32
SEGMENT = 1 << 18
MASK = (1 << 64) - 1


class Codec(NamedTuple):
    name: str
    number: int
    parameter: float = 0.0
    stochastic: bool = False

    def size(self, dtype, count):
        """Bytes of an encoded segment; 0: the codec does not take the dtype."""
        return lib.bhvd_encoded_size(self.number, DTYPES[dtype], count, self.options(0)) if count else 0

    def options(self, seed):
        return ffi.new("struct bhvd_codec_options *", self.fields(seed)["codec_options"])

    def encode(self, dtype, stored, seed):
        stored = np.ascontiguousarray(stored)
        code = np.empty(self.size(dtype, stored.size), np.uint8)
        to, src = ffi.from_buffer(code), ffi.from_buffer(stored)
        status = lib.bhvd_encode(self.number, DTYPES[dtype], to, src, stored.size, self.options(seed))
        assert status == lib.BHVD_OK
        return code

    def round_trip(self, dtype, stored, seed):
        """D(Q(stored)), stored."""
        code, decoded = self.encode(dtype, stored, seed), np.empty_like(stored)
        to, src = ffi.from_buffer(decoded), ffi.from_buffer(code)
        status = lib.bhvd_decode(self.number, DTYPES[dtype], to, src, stored.size, self.options(0))
        assert status == lib.BHVD_OK
        return decoded

    def fields(self, seed=0):
        """For Context.post."""
        options = {"parameter": self.parameter, "seed": seed, "stochastic": self.stochastic}
        return {"codec": self.number, "codec_options": options}


CODECS = [Codec(name, getattr(lib, f"BHVD_CODEC_{name.upper()}"), *parameter) for name, *parameter in [
    ("minmax_uint8",), ("sign",), ("sign_rms",), ("ternary",), ("qsgd",), ("qsgd", 3), ("float16",), ("bfloat16",),
    ("float32",), ("block8",), ("block4", 64, True), ("block8_minmax", 512, True), ("block4_minmax", 128),
    ("float8_e4m3", 128), ("float8_e5m2", 64), ("topk",), ("topk", 0.25), ("topk_2bit",),
    ("topk_2bit", 0.25),
]]


def mix(h, v):
    """One step of encoder_seed: native/kernel/segments.h."""
    h = (h + (v + 1) * 0x9E3779B97F4A7C15) & MASK
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 & MASK
    h = (h ^ h >> 27) * 0x94D049BB133111EB & MASK
    return h ^ h >> 31


def segment_seed(seed, rank, is_mean, begin):
    return mix(mix(mix(seed, rank), is_mean), begin)


def segments(begin, end):
    """Slices of at most SEGMENT elements."""
    return [slice(at, min(at + SEGMENT, end)) for at in range(begin, end, SEGMENT)]


def chunks(count, n):
    """Chunk k of a flat vector: the first count % n are one element longer."""
    ends = np.cumsum([count // n + (k < count % n) for k in range(n)])
    return [(int(begin), int(end)) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def lossy(codec, dtype, value, error, seed):
    """D(Q(value + error)), stored. error: float32, updated in place, or None."""
    if error is None:
        return codec.round_trip(dtype, value, seed)
    wanted = load(dtype, value).astype(F) + error
    decoded = codec.round_trip(dtype, store(dtype, wanted), seed)
    error[:] = np.where(np.isfinite(lost := wanted - load(dtype, decoded).astype(F)), lost, 0)
    return decoded


def summed(codec, dtype, inputs, part, seeds, worker_errors, factor, offset):
    """factor * sum_i D(Q(v_i)) of one segment: in float32, in rank order."""
    total = np.zeros(part.stop - part.start, F)
    for i, x in enumerate(inputs):
        error = worker_errors[i][part] if worker_errors else None
        decoded = lossy(codec, dtype, x[part], error, segment_seed(seeds[i], i, 0, offset + part.start))
        total = (total + load(dtype, decoded)).astype(F)
    return total * F(factor) if factor != 1 else total


def scatter_gather(codec, dtype, inputs, seeds, factor, worker_errors=None, server_errors=None, offset=0):
    """What every rank ends with. Error states are updated in place: one of N for each rank, one of its chunk.

    offset: of the vector in a larger one, whose shard it is.
    """
    out = np.empty_like(inputs[0])
    for k, (begin, end) in enumerate(chunks(len(out), len(inputs))):
        for part in segments(begin, end):
            total = summed(codec, dtype, inputs, part, seeds, worker_errors, factor, offset)
            error = server_errors[k][part.start - begin:part.stop - begin] if server_errors else None
            seed = segment_seed(seeds[k], k, 1, offset + part.start)
            out[part] = lossy(codec, dtype, store(dtype, total), error, seed)
    return out


def allgather(codec, dtype, inputs, seeds, factor, worker_errors=None, offset=0):
    out = np.empty_like(inputs[0])
    for part in segments(0, len(out)):
        out[part] = store(dtype, summed(codec, dtype, inputs, part, seeds, worker_errors, factor, offset))
    return out


def encoded_bytes(codec, dtype, begin, end):
    return sum(codec.size(dtype, part.stop - part.start) for part in segments(begin, end))
