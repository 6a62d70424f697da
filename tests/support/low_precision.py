"""The low-precision primitives in NumPy. Q and D are the core's codecs, which have their own tests."""
from typing import NamedTuple

import numpy as np

import rotated
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

    @property
    def rotates(self):
        return self.name.startswith("rotated")

    @property
    def bits(self):
        return int(self.name[-1])

    @property
    def block(self):
        return int(self.parameter or 512)

    def size(self, dtype, count):
        """Bytes of an encoded segment; 0: the codec does not support the dtype."""
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
        """D(Q(stored)), as stored."""
        return self.decode(dtype, self.encode(dtype, stored, seed), stored)

    def decode(self, dtype, code, like):
        """Decodes as many elements as `like`, a stored array, has."""
        decoded = np.empty_like(like)
        to, src = ffi.from_buffer(decoded), ffi.from_buffer(code)
        status = lib.bhvd_decode(self.number, DTYPES[dtype], to, src, like.size, self.options(0))
        assert status == lib.BHVD_OK
        return decoded

    def fields(self, seed=0):
        """Arguments for Context.post."""
        options = {"parameter": self.parameter, "seed": seed, "stochastic": self.stochastic}
        return {"codec": self.number, "codec_options": options}


CODECS = [Codec(name, getattr(lib, f"BHVD_CODEC_{name.upper()}"), *parameter) for name, *parameter in [
    ("minmax_uint8",), ("sign",), ("sign_rms",), ("float16",), ("bfloat16",),
    ("float32",), ("block8",), ("block4", 64, True), ("block8", 512, True), ("block4", 128),
    ("float8", 128), ("rotated1", 256), ("rotated2",), ("rotated3", 2048), ("rotated4", 1024),
    ("topk",), ("topk", 0.25), ("topk_2bit",),
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


def seed_of(codec, seed, rank, is_mean, begin):
    """Rotating codecs have the same signs on all ranks with the same seed, and in both phases."""
    return segment_seed(seed, 0, 0, begin) if codec.rotates else segment_seed(seed, rank, is_mean, begin)


def segments(begin, end):
    """Slices of at most SEGMENT elements."""
    return [slice(at, min(at + SEGMENT, end)) for at in range(begin, end, SEGMENT)]


def chunks(count, n):
    """Chunk k of a flat vector: the first count % n are one element longer."""
    ends = np.cumsum([count // n + (k < count % n) for k in range(n)])
    return [(int(begin), int(end)) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def encoded(codec, dtype, value, error, seed):
    """Q(value + error). error: float32, updated in place, or None."""
    if error is None:
        return codec.encode(dtype, value, seed)
    wanted = load(dtype, value).astype(F) + error
    code = codec.encode(dtype, store(dtype, wanted), seed)
    decoded = codec.decode(dtype, code, value)
    error[:] = np.where(np.isfinite(lost := wanted - load(dtype, decoded).astype(F)), lost, 0)
    return code


def lossy(codec, dtype, value, error, seed):
    """D(Q(value + error)), stored."""
    return codec.decode(dtype, encoded(codec, dtype, value, error, seed), value)


def codes(codec, dtype, inputs, part, seeds, worker_errors, offset):
    """Q(v_i) of one segment."""
    return [encoded(codec, dtype, x[part], worker_errors[i][part] if worker_errors else None,
                    seed_of(codec, seeds[i], i, 0, offset + part.start)) for i, x in enumerate(inputs)]


def summed(codec, dtype, like, part, factor):
    """factor times the sum of one segment's codes, as stored: in float32, in rank order."""
    total = np.zeros(part.size, F)
    for code in like:
        total = (total + load(dtype, codec.decode(dtype, code, part))).astype(F)
    return store(dtype, total * F(factor) if factor != 1 else total)


def coefficients_summed(codec, like, part, factor):
    total = sum(rotated.z_of(code, codec.bits, part.size, codec.block) for code in like)
    return total * F(factor) if factor != 1 else total


def adds_coefficients(codec, like):
    return codec.rotates and len({rotated.key_of(code) for code in like}) == 1


def from_floats(dtype, x):
    """x as stored; no float16 becomes infinite."""
    return store(dtype, np.clip(x, -65504, 65504) if dtype == "float16" else x)


def mean(codec, dtype, like, part, factor):
    """The mean of codes, as stored."""
    if not adds_coefficients(codec, like):
        return summed(codec, dtype, like, part, factor)
    z = coefficients_summed(codec, like, part, factor)
    return from_floats(dtype, rotated.inverse(z, rotated.key_of(like[0]), part.size, codec.block))


def scatter_gather(codec, dtype, inputs, seeds, factor, worker_errors=None, server_errors=None, offset=0):
    """Every rank's result. Updates error states in place: each rank has one of N elements, and one for its chunk.

    offset: the vector's offset in a larger one, of which it is a shard.
    """
    out = np.empty_like(inputs[0])
    for k, (begin, end) in enumerate(chunks(len(out), len(inputs))):
        for part in segments(begin, end):
            like = codes(codec, dtype, inputs, part, seeds, worker_errors, offset)
            if adds_coefficients(codec, like) and not server_errors:
                z, key = coefficients_summed(codec, like, out[part], factor), rotated.key_of(like[0])
                code = rotated.encode_coefficients(z, codec.bits, key, out[part].size, codec.block)
                out[part] = from_floats(dtype, rotated.decode(code, codec.bits, out[part].size, codec.block))
                continue
            error = server_errors[k][part.start - begin:part.stop - begin] if server_errors else None
            seed = seed_of(codec, seeds[k], k, 1, offset + part.start)
            out[part] = lossy(codec, dtype, mean(codec, dtype, like, out[part], factor), error, seed)
    return out


def allgather(codec, dtype, inputs, seeds, factor, worker_errors=None, offset=0):
    out = np.empty_like(inputs[0])
    for part in segments(0, len(out)):
        like = codes(codec, dtype, inputs, part, seeds, worker_errors, offset)
        out[part] = mean(codec, dtype, like, out[part], factor)
    return out


def encoded_bytes(codec, dtype, begin, end):
    return sum(codec.size(dtype, part.stop - part.start) for part in segments(begin, end))
