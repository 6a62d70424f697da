"""Measures the codecs on one core, beside a copy of as many bytes: `python -m bagua_hvd.bench.codecs`.

A speed is bytes read plus bytes written by the CPU time of the thread, so that other processes count less; of all
rounds the shortest time counts, for the copy too.
"""
import argparse
from time import thread_time

import numpy as np

from bagua_hvd import codecs
from bagua_hvd.core import native
from bagua_hvd.core.native import ffi, lib

CODECS = (codecs.minmax_uint8, codecs.sign, codecs.sign_rms, codecs.ternary, codecs.qsgd(), codecs.float16,
          codecs.bfloat16, codecs.topk(), codecs.block(8), codecs.block(8, stochastic=True), codecs.block(4),
          codecs.block(4, stochastic=True), codecs.block(8, scale="minmax"), codecs.block(4, scale="minmax"),
          codecs.float8("e4m3"), codecs.float8("e5m2"), codecs.topk(0.02, bits=2))


def _seconds(function, *arguments):
    started = thread_time()
    function(*arguments)
    return thread_time() - started


def measure(codec, values, rounds):
    """Speeds for float32 `values`, in GB/s: (encode, decode, copy)."""
    nbytes = codec.encoded_size(native.FLOAT32, values.size)
    code, decoded = np.ones(nbytes, np.uint8), np.ones_like(values)
    traffic = values.nbytes + nbytes
    copied = np.ones((traffic + 1) // 2, np.uint8)
    source = np.ones_like(copied)
    options = codec.options(seed=1)
    x, q, y, to, at = (ffi.cast("void *", array.ctypes.data) for array in (values, code, decoded, copied, source))
    times = np.array([(
        _seconds(lib.bhvd_encode, codec.number, native.FLOAT32, q, x, values.size, options),
        _seconds(lib.bhvd_decode, codec.number, native.FLOAT32, y, q, values.size, options),
        _seconds(ffi.memmove, to, at, copied.nbytes),
    ) for _ in range(rounds)])
    return traffic / times.min(axis=0) / 1e9


def main():
    parser = argparse.ArgumentParser(prog="python -m bagua_hvd.bench.codecs", description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="of float32 values; default 64")
    parser.add_argument("--rounds", type=int, default=10, help="default 10")
    options = parser.parse_args()
    values = np.random.default_rng(0).standard_normal(options.mib << 18).astype(np.float32)
    print(f"{options.mib} MiB of float32, {native.ffi.string(lib.bhvd_cpu_features()).decode()}, GB/s read + written")
    print(f"{'codec':20}{'encode':>8}{'of copy':>9}{'decode':>8}{'of copy':>9}{'copy':>8}")
    for codec in CODECS:
        encode, decode, copy = measure(codec, values, options.rounds)
        name = codec.name + ("/random" if codec.stochastic else "")
        print(f"{name:20}{encode:8.1f}{encode / copy:9.0%}{decode:8.1f}{decode / copy:9.0%}{copy:8.1f}")


if __name__ == "__main__":
    main()
