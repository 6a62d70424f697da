"""What a GPU does: copies, the kernels of native/device/kernels.cu beside them, and allreduces of its tensors.

`python -m bagua_hvd.bench --device cuda`: the first two by itself; the last in a job (`baguarun -np 2 python -m
bagua_hvd.bench --device cuda`), whose ranks may share a GPU. Bandwidths count all bytes read and written, the copy's
too, and are the median of RUNS timings by the GPU's own events. Every result is checked against the C kernels.
"""
import statistics

import numpy as np

from bagua_hvd.bench.rank import human_nbytes, resnet50_counts
from bagua_hvd.common import device, device_kernels, native
from bagua_hvd.common.native import ffi, lib

NBYTES = 256 << 20
RUNS = 20
THREADS = 256
# Blocks of threads of a launch: several times what any GPU runs at once.
BLOCKS = 4096
CODEC = lib.BHVD_CODEC_MINMAX_UINT8
SEGMENT = 1 << 18               # elements, as native/primitive/encoder.h


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


def _measure_codec(table, kernels, chunks):
    """Encodes NBYTES of float32 in `chunks` chunks, and decodes the sum of 2 codes of them all."""
    import cupy

    count = NBYTES // 4
    per_chunk = BLOCKS // chunks
    each = lib.bhvd_chunk_count(count, chunks)
    stride = lib.bhvd_encoded_size(CODEC, native.FLOAT32, each, ffi.NULL)
    x = cupy.random.default_rng(1).standard_normal(count, dtype=cupy.float32)
    ranges, codes = cupy.zeros(chunks * per_chunk * 3, cupy.float32), cupy.zeros(chunks * stride, cupy.uint8)
    grid = chunks * per_chunk
    find, encode = kernels.function("minmax_uint8_ranges_f32"), kernels.function("minmax_uint8_encode_f32")

    def run():
        _launch(find, grid, ranges, x, count, chunks, per_chunk)
        _launch(encode, grid, codes, stride, x, ranges, count, chunks, per_chunk)

    table.line(f"encode minmax_uint8, {chunks} chunks of float32", 2 * NBYTES + count, _seconds(run))
    part, expected = x[:each].get(), np.zeros(stride, np.uint8)
    lib.bhvd_encode(CODEC, native.FLOAT32, ffi.from_buffer(expected), ffi.from_buffer(part), each, ffi.NULL)
    _check("encode", codes[:stride].get(), expected)
    decode, out = kernels.function("minmax_uint8_decode_f32"), cupy.zeros(each, cupy.float32)
    seconds = _seconds(lambda: _launch(decode, BLOCKS, out, codes, each))
    table.line("decode minmax_uint8, one chunk", 5 * each, seconds)
    lib.bhvd_decode(CODEC, native.FLOAT32, ffi.from_buffer(part), ffi.from_buffer(expected), each, ffi.NULL)
    _check("decode", out.get(), part)
    total = kernels.function("minmax_uint8_decode_sum_f32")
    seconds = _seconds(lambda: _launch(total, BLOCKS, out, codes, stride, chunks, each))
    table.line(f"decode and sum {chunks} codes of a chunk", (4 + chunks) * each, seconds)


def _measure_bits(table, kernels, name, codec):
    """Encodes NBYTES of float32 in segments, with error feedback, and decodes them."""
    import cupy

    count, segments = NBYTES // 4, NBYTES // 4 // SEGMENT
    stride = lib.bhvd_encoded_size(codec, native.FLOAT32, SEGMENT, ffi.NULL)
    x = cupy.random.default_rng(1).standard_normal(count, dtype=cupy.float32)
    codes, error = cupy.zeros(segments * stride, cupy.uint8), cupy.zeros(count, cupy.float32)
    last = cupy.zeros(segments, cupy.uint64) if name == "ternary" else 0      # seeds; sign: the mean, not squares
    encode, decode = kernels.function(f"{name}_encode_f32"), kernels.function(f"{name}_decode_f32")
    _launch(encode, segments, codes, stride, x, 0, count, SEGMENT, last)
    part, expected = x[:SEGMENT].get(), np.zeros(stride, np.uint8)
    lib.bhvd_encode(codec, native.FLOAT32, ffi.from_buffer(expected), ffi.from_buffer(part), SEGMENT, ffi.NULL)
    _check(f"encode {name}", codes[:stride].get(), expected)
    for fed_back, extra in ((0, 0), (error, 2 * NBYTES)):       # the error is read and written
        seconds = _seconds(lambda e=fed_back: _launch(encode, segments, codes, stride, x, e, count, SEGMENT, last))
        table.line(f"encode {name}{', with error feedback' if extra else ''}", NBYTES + codes.nbytes + extra, seconds)
    out = cupy.zeros(count, cupy.float32)
    seconds = _seconds(lambda: _launch(decode, BLOCKS, out, codes, stride, count, SEGMENT))
    table.line(f"decode {name}", NBYTES + codes.nbytes, seconds)


def _check(what, got, expected):
    if got.tobytes() != expected.tobytes():
        raise SystemExit(f"bench: {what} on the GPU gives other bytes than on the CPU")


def _measure_pack(table, kernels):
    """ResNet-50's gradients into one buffer, in one launch; each begins at a multiple of 64 bytes there."""
    import cupy

    gradients = [cupy.random.default_rng(1).standard_normal(count, dtype=cupy.float32) for count in resnet50_counts()]
    starts = np.cumsum([0] + [-(-gradient.nbytes // 64) * 64 for gradient in gradients])
    flat, pieces = cupy.zeros(int(starts[-1]), cupy.uint8), 0
    spans = np.zeros((len(gradients), 4), np.uint64)
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
    for chunks in (1, 8):
        _measure_codec(table, kernels, chunks)
    _measure_bits(table, kernels, "sign", lib.BHVD_CODEC_SIGN)
    _measure_bits(table, kernels, "ternary", lib.BHVD_CODEC_TERNARY)
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
