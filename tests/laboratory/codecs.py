"""Measures the codecs on one core, compared with a copy of the same size.

    python -m tests.laboratory.codecs            prints the speeds
    python -m tests.laboratory.codecs --record   and appends a record "codecs"

The speed is bytes read plus bytes written, divided by the thread's CPU time, so that other processes count less. The
shortest of all rounds counts, also for the copy. Data is encoded segment by segment, as in the primitives.
"""
import argparse
import statistics
from time import thread_time

import numpy as np

from bagua_hvd import codecs
from bagua_hvd.bench import report
from bagua_hvd.core import native
from bagua_hvd.core.native import ffi, lib
from tests.laboratory import records

# The names in the documentation.
CODECS = {
    "minmax_uint8": codecs.minmax_uint8, "sign": codecs.sign, "sign_rms": codecs.sign_rms,
    "float16": codecs.float16, "bfloat16": codecs.bfloat16, "topk()": codecs.topk(),
    "topk(0.02, bits=2)": codecs.topk(0.02, bits=2), "block(8)": codecs.block(8),
    "block(8, stochastic=True)": codecs.block(8, stochastic=True), "block(4)": codecs.block(4),
    "block(4, stochastic=True)": codecs.block(4, stochastic=True),
    "float8()": codecs.float8(), **{f"rotated({bits})": codecs.rotated(bits) for bits in (1, 2, 3, 4)},
}
TIMED = "encode", "decode", "copy"


def _seconds(function, *arguments):
    started = thread_time()
    function(*arguments)
    return thread_time() - started


def _each(function, codec, to, at, parts, options):
    for dst, src, count in parts:
        function(codec.number, native.FLOAT32, to + dst, at + src, count, options)


def measure(codec, values, rounds, segment):
    """(bytes read and written for float32 `values`, seconds of all rounds: encode, decode, copy)."""
    counts = [min(segment, values.size - begin) for begin in range(0, values.size, segment)]
    sizes = [codec.encoded_size(native.FLOAT32, count) for count in counts]
    nbytes, ends = sum(sizes), np.cumsum([0, *sizes]).tolist()
    encoded = [(end, 4 * place * segment, count) for place, (end, count) in enumerate(zip(ends, counts, strict=False))]
    decoding = [(src, dst, count) for dst, src, count in encoded]
    code, decoded = np.ones(nbytes, np.uint8), np.ones_like(values)
    traffic = values.nbytes + nbytes
    copied = np.ones((traffic + 1) // 2, np.uint8)
    source = np.ones_like(copied)
    options = codec.options(seed=1)
    x, q, y, to, at = (ffi.cast("char *", array.ctypes.data) for array in (values, code, decoded, copied, source))
    times = [(
        _seconds(_each, lib.bhvd_encode, codec, q, x, encoded, options),
        _seconds(_each, lib.bhvd_decode, codec, y, q, decoding, options),
        _seconds(ffi.memmove, to, at, copied.nbytes),
    ) for _ in range(rounds)]
    return traffic, [list(each) for each in zip(*times, strict=True)]


def _speeds(nbytes, times):
    """GB/s for each of TIMED."""
    return [nbytes / min(each) / 1e9 for each in times]


def speeds():
    """For the newest code: medians of the runs' speeds, and of their ratio to the copy's. Records "codecs"."""
    runs = records.read("codecs")
    runs = [run for run in runs if run.revision == runs[-1].revision]
    if not runs:
        return "Nothing measured yet."
    lines = []
    for name in CODECS:
        if not all(f"{name}: bytes" in run.samples for run in runs):
            continue
        found = [_speeds(run.samples[f"{name}: bytes"].values[0],
                         [run.samples[f"{name}: {what}"].values for what in TIMED]) for run in runs]
        encode, encode_share, decode, decode_share = (statistics.median(each) for each in zip(*(
            (encode, encode / copy, decode, decode / copy) for encode, decode, copy in found), strict=True))
        lines.append((f"`{name}`", f"{encode:.1f}", f"{encode_share:.0%}", f"{decode:.1f}", f"{decode_share:.0%}"))
    head = "GB/s", "encode", "of memcpy", "decode", "of memcpy"
    return report.table(head, lines, left=1)


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.laboratory.codecs", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="of float32 values; default 64")
    parser.add_argument("--rounds", type=int, default=10, help="default 10")
    parser.add_argument("--segment", type=int, default=1 << 18, help="elements; default 2^18, the primitives'")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--folder", default=records.FOLDER, help="of the records")
    options = parser.parse_args()
    values = np.random.default_rng(0).standard_normal(options.mib << 18).astype(np.float32)
    features = native.ffi.string(lib.bhvd_cpu_features()).decode()
    print(f"{options.mib} MiB of float32 by {options.segment} elements, {features}, GB/s read + written")
    print(f"{'codec':27}{'encode':>8}{'of copy':>9}{'decode':>8}{'of copy':>9}{'copy':>8}")
    samples = {}
    for name, codec in CODECS.items():
        nbytes, times = measure(codec, values, options.rounds, options.segment)
        samples[f"{name}: bytes"] = "bytes", [nbytes]
        samples |= {f"{name}: {what}": ("s", each) for what, each in zip(TIMED, times, strict=True)}
        encode, decode, copy = _speeds(nbytes, times)
        print(f"{name:27}{encode:8.1f}{encode / copy:9.0%}{decode:8.1f}{decode / copy:9.0%}{copy:8.1f}")
    if options.record:
        records.append("codecs", {"mib": options.mib, "segment": options.segment, "features": features}, samples,
                       folder=options.folder)


if __name__ == "__main__":
    main()
