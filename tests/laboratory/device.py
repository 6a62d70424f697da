"""What a GPU does: copies, the kernels of native/device/kernels.cu beside them, and allreduces of its tensors.

`python -m tests.laboratory.device`: the first two by itself; the last in a job (`baguarun -np 2 python -m
tests.laboratory.device`), whose ranks may share a GPU. Bandwidths count all bytes read and written, the copy's
too, and are the median of RUNS timings by the GPU's own events. Every result is checked against the C kernels.
"""
import argparse
import statistics

import numpy as np

from bagua_hvd.bench.rank import human_nbytes, resnet50_counts
from bagua_hvd.core import device, device_kernels, native, variables
from bagua_hvd.core.native import ffi, lib

NBYTES = 256 << 20              # unless --nbytes says otherwise, and --runs
RUNS = 20
THREADS = 256
# Blocks of threads of a launch: several times what any GPU runs at once.
BLOCKS = 4096
SEGMENT = 1 << 18               # elements, as native/kernel/segments.h
PER_SEGMENT = 64                # blocks of threads for one, as native/gpu/device_encoder.c
SUMS_BLOCK = 512                # elements, as native/kernel/codec_sums.h


def missing():
    """Why nothing can be measured here; "" when it can."""
    _, count, reason = device.cuda_facts()
    if not count:
        return reason or "the driver finds no GPU"
    return "" if device_kernels.available() else "CuPy is not installed: pip install 'bagua_hvd[cuda13]' (or [cuda12])"


def _seconds(run):
    """Median over RUNS, after one that is not counted."""
    import cupy

    times = []
    for _ in range(RUNS + 1):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / 1000)
    return statistics.median(times[1:])


def _launch(kernel, blocks, *arguments):
    words = tuple(np.float64(a) if isinstance(a, float) else np.uint64(a if isinstance(a, int) else a.data.ptr)
                  for a in arguments)
    kernel((blocks,), (THREADS,), words)


class _Table:
    """Lines with a bandwidth and its share of the copy's."""

    def __init__(self, copy_bandwidth):
        self.copy_bandwidth = copy_bandwidth

    def line(self, name, nbytes, seconds):
        bandwidth = nbytes / seconds
        print(f"{name:<44} {seconds * 1e6:>10.1f} us {bandwidth / 1e9:>9.1f} GB/s "
              f"{100 * bandwidth / self.copy_bandwidth:>6.1f} %", flush=True)


def _measure_codec(table, kernels, name, codec, per_segment, option=0):
    """Encodes NBYTES of float32 in segments of SEGMENT elements, decodes them, and sums two ranks' codes.

    per_segment: blocks of threads for each segment. option: what the kernels take besides.
    """
    import cupy

    count, segments = NBYTES // 4, NBYTES // 4 // SEGMENT
    stride = lib.bhvd_encoded_size(codec, native.FLOAT32, SEGMENT, ffi.NULL)
    x = cupy.random.default_rng(1).standard_normal(count, dtype=cupy.float32)
    codes, out = cupy.zeros(2 * segments * stride, cupy.uint8), cupy.zeros(count, cupy.float32)
    ranges = cupy.zeros(segments * max(per_segment * 3, SEGMENT // SUMS_BLOCK * 2), cupy.float32)
    decode, total = (kernels.function(f"{name}_{step}_f32") for step in ("decode", "decode_sum"))
    one_pass = name in ("sign", "rotated")
    steps = [(f"{name}_encode", per_segment), (f"{name}_header", 1)]
    if not one_pass:
        steps = [("minmax_uint8_ranges", per_segment), (f"{name}_encode", per_segment)]
    steps = [(kernels.function(f"{step}_f32"), blocks) for step, blocks in steps]

    def run():
        for step, blocks in steps:
            _launch(step, segments * blocks, codes, segments * stride, stride, x, count, 1, SEGMENT, blocks, ranges,
                    option, 0, 0)

    nbytes = NBYTES + segments * stride
    table.line(f"encode {name}", nbytes if one_pass else nbytes + NBYTES, _seconds(run))
    part, expected = x[:SEGMENT].get(), np.zeros(stride, np.uint8)
    options = ffi.new("struct bhvd_codec_options *", {"seed": _mix(0, 0)})
    lib.bhvd_encode(codec, native.FLOAT32, ffi.from_buffer(expected), ffi.from_buffer(part), SEGMENT, options)
    _check(f"encode {name}", codes[:stride].get(), expected)
    seconds = _seconds(lambda: _launch(decode, segments * PER_SEGMENT, out, codes, segments * stride, stride, count, 1,
                                       SEGMENT, PER_SEGMENT, option))
    table.line(f"decode {name}", nbytes, seconds)
    lib.bhvd_decode(codec, native.FLOAT32, ffi.from_buffer(part), ffi.from_buffer(expected), SEGMENT, options)
    _check(f"decode {name}", out[:SEGMENT].get(), part)
    codes[segments * stride:] = codes[:segments * stride]
    seconds = _seconds(lambda: _launch(total, segments * PER_SEGMENT, out, codes, segments * stride, stride, 2, count,
                                       SEGMENT, PER_SEGMENT, 0.5, option))
    table.line(f"decode and average 2 codes of {name}", nbytes + segments * stride, seconds)
    _check(f"the mean of {name}", out[:SEGMENT].get(), part)        # of two equal codes


def _mix(h, v):
    """kernel/segments.h: the seed of the segment at element v."""
    mask = (1 << 64) - 1
    h = (h + (v + 1) * 0x9E3779B97F4A7C15) & mask
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 & mask
    h = (h ^ h >> 27) * 0x94D049BB133111EB & mask
    return h ^ h >> 31


def _measure_feedback(table, kernels):
    """Error feedback around a codec: what is added before, and what is kept afterwards."""
    import cupy

    count = NBYTES // 4
    x, error = (cupy.random.default_rng(seed).standard_normal(count, dtype=cupy.float32) for seed in (1, 2))
    total = cupy.zeros(count, cupy.float32)
    feed, keep = kernels.function("feed_error_f32"), kernels.function("update_residual_f32")
    seconds = _seconds(lambda: _launch(feed, BLOCKS, total, 0, error, x, count))
    _check("feeding errors", total.get(), error.get() + x.get())
    table.line("feed errors of float32", 3 * NBYTES, seconds)
    table.line("keep what was lost", 3 * NBYTES, _seconds(lambda: _launch(keep, BLOCKS, total, x, count)))


def _check(what, got, expected):
    if got.tobytes() != expected.tobytes():
        raise SystemExit(f"bench: {what} on the GPU gives other bytes than on the CPU")


def _measure_pack(table, kernels):
    """ResNet-50's gradients into one buffer, in one launch; each begins at a multiple of 64 bytes there."""
    import cupy

    gradients = [cupy.random.default_rng(1).standard_normal(count, dtype=cupy.float32) for count in resnet50_counts()]
    starts = np.cumsum([0] + [-(-gradient.nbytes // 64) * 64 for gradient in gradients])
    flat, pieces = cupy.zeros(int(starts[-1]), cupy.uint8), 0
    spans: np.ndarray = np.zeros((len(gradients), 4), np.uint64)
    for i, gradient in enumerate(gradients):
        spans[i] = gradient.data.ptr, flat.data.ptr + int(starts[i]), gradient.nbytes, pieces
        pieces += -(-gradient.nbytes // 16384)
    spans_on_gpu, kernel = cupy.asarray(spans), kernels.function("copy_spans")
    nbytes = sum(gradient.nbytes for gradient in gradients)
    seconds = _seconds(lambda: _launch(kernel, pieces, spans_on_gpu, len(gradients)))
    table.line(f"pack {len(gradients)} gradients of ResNet-50, {human_nbytes(nbytes)}", 2 * nbytes, seconds)
    for start, gradient in zip(starts, gradients, strict=False):
        _check("pack", flat[int(start):int(start) + gradient.nbytes].get(), gradient.get())


def _copy_seconds():
    import cupy

    src, dst = cupy.zeros(NBYTES, cupy.uint8), cupy.zeros(NBYTES, cupy.uint8)
    return _seconds(lambda: dst.data.copy_from_device_async(src.data, NBYTES, cupy.cuda.get_current_stream()))


def measure_kernels():
    import cupy

    kernels = device_kernels.Kernels(0)
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    print(f"{properties['name'].decode()}, CUDA driver {cupy.cuda.runtime.driverGetVersion()}, CuPy {cupy.__version__}")
    seconds = _copy_seconds()
    table = _Table(2 * NBYTES / seconds)
    table.line(f"copy of {human_nbytes(NBYTES)} by the driver", 2 * NBYTES, seconds)
    _measure_codec(table, kernels, "minmax_uint8", lib.BHVD_CODEC_MINMAX_UINT8, PER_SEGMENT)
    _measure_codec(table, kernels, "sign", lib.BHVD_CODEC_SIGN, PER_SEGMENT // 2)
    _measure_codec(table, kernels, "rotated", lib.BHVD_CODEC_ROTATED2, PER_SEGMENT, option=512 << 8 | 2)
    _measure_feedback(table, kernels)
    _measure_pack(table, kernels)


def measure_job(sizes):
    """Allreduces of CUDA tensors by the ranks of this job: until the result is there, and until the host may go on."""
    import torch

    import bagua_hvd.torch as hvd

    hvd.init()
    gpu = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    for nbytes in sizes:
        x = torch.ones(max(1, nbytes // 4), device=gpu)
        samples = []
        for run in range(RUNS + 1):
            hvd.barrier()
            torch.cuda.synchronize(gpu)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            y = hvd.allreduce(x, op=hvd.Sum, name=f"bench.{nbytes}.{run}")
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1000)
        if not bool((y == hvd.size()).all()):
            raise SystemExit(f"bench: an allreduce of {nbytes} bytes on the GPU is wrong")
        if hvd.rank() == 0:
            print(f"allreduce of {human_nbytes(nbytes):>8} on {hvd.size()} ranks "
                  f"{statistics.median(samples[1:]):>10.1f} us", flush=True)
    hvd.shutdown()


def main(arguments=None):
    """The program."""
    global NBYTES, RUNS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nbytes", type=int, default=NBYTES, help="of the vector that is copied and encoded")
    parser.add_argument("--runs", type=int, default=RUNS)
    args = parser.parse_args(arguments)
    NBYTES, RUNS = args.nbytes, args.runs
    if why := missing():
        raise SystemExit(f"nothing can be measured here: {why}")
    if variables.given("HOROVOD_SIZE"):
        measure_job([4, 1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26])
    else:
        measure_kernels()


if __name__ == "__main__":
    main()
