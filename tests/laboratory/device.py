"""Measures a GPU: copies, the kernels of native/device/kernels.cu compared with them, and allreduces of its tensors.

`python -m tests.laboratory.device` measures the first two; a job (`baguarun -np 2 python -m tests.laboratory.device`)
measures the last one; its ranks may share a GPU. Bandwidths count all bytes read and written, also for the copy, and
are the median of RUNS timings by the GPU's own events. Every result is checked against the C kernels. `--record`
appends a record "device".
"""
import argparse
import statistics
import tempfile
import time

import numpy as np

from bagua_hvd.bench import report
from bagua_hvd.bench.__main__ import job_rank, job_size
from bagua_hvd.bench.rank import human_nbytes, resnet50_counts
from bagua_hvd.core import device, native
from bagua_hvd.core.native import ffi, lib
from tests.laboratory import records

NBYTES = 256 << 20              # default of --nbytes and of --runs
RUNS = 20
THREADS = 256
# Thread blocks of a launch: several times as many as any GPU runs concurrently.
BLOCKS = 4096
SEGMENT = 1 << 18               # elements, as native/kernel/segments.h
PER_SEGMENT = 64                # thread blocks for one, as in native/gpu/device_encoder.c
SUMS_BLOCK = 512                # elements, as in native/kernel/codec.h


def missing():
    """The reason why this machine cannot measure; "" if it can."""
    _, count, reason = device.cuda_facts()
    if not count:
        return reason or "the driver finds no GPU"
    return "" if device.cupy_is_installed() else "CuPy is not installed: pip install 'bagua_hvd[cuda13]' (or [cuda12])"


def _times(run):
    """Seconds of RUNS runs, after one warm-up."""
    import cupy

    times = []
    for _ in range(RUNS + 1):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / 1000)
    return times[1:]


def _launch(kernel, blocks, *arguments):
    words = tuple(np.float64(a) if isinstance(a, float) else np.uint64(a if isinstance(a, int) else a.data.ptr)
                  for a in arguments)
    kernel((blocks,), (THREADS,), words)


COPY = "copy by the driver"


class _Table:
    """Lines with a bandwidth and its ratio to that of the copy, the first line."""

    def __init__(self):
        self.samples = {}

    def line(self, name, nbytes, times):
        self.samples |= {f"{name}: bytes": ("bytes", [nbytes]), f"{name}: time": ("s", times)}
        bandwidth, share = _bandwidth(self.samples, name)
        print(f"{name:<44} {statistics.median(times) * 1e6:>10.1f} us {bandwidth:>9.1f} GB/s {share:>6.1%}", flush=True)


def _bandwidth(samples, name):
    """GB/s, and the ratio to the copy's. samples: {name: (unit, values)}."""
    found, copied = (samples[f"{each}: bytes"][1][0] / statistics.median(samples[f"{each}: time"][1]) / 1e9
                     for each in (name, COPY))
    return found, found / copied


def _measure_codec(table, kernels, name, codec, per_segment, option=0):
    """Encodes NBYTES of float32 in segments of SEGMENT elements, decodes them, and sums two ranks' codes.

    per_segment: thread blocks for each segment. option: the kernels' extra argument.
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
    table.line(f"encode {name}", nbytes if one_pass else nbytes + NBYTES, _times(run))
    part, expected = x[:SEGMENT].get(), np.zeros(stride, np.uint8)
    options = ffi.new("struct bhvd_codec_options *", {"seed": _mix(0, 0)})
    lib.bhvd_encode(codec, native.FLOAT32, ffi.from_buffer(expected), ffi.from_buffer(part), SEGMENT, options)
    _check(f"encode {name}", codes[:stride].get(), expected)
    times = _times(lambda: _launch(decode, segments * PER_SEGMENT, out, codes, segments * stride, stride, count, 1,
                                       SEGMENT, PER_SEGMENT, option))
    table.line(f"decode {name}", nbytes, times)
    lib.bhvd_decode(codec, native.FLOAT32, ffi.from_buffer(part), ffi.from_buffer(expected), SEGMENT, options)
    _check(f"decode {name}", out[:SEGMENT].get(), part)
    codes[segments * stride:] = codes[:segments * stride]
    times = _times(lambda: _launch(total, segments * PER_SEGMENT, out, codes, segments * stride, stride, 2, count,
                                       SEGMENT, PER_SEGMENT, 0.5, option))
    table.line(f"decode and average 2 codes of {name}", nbytes + segments * stride, times)
    _check(f"the mean of {name}", out[:SEGMENT].get(), part)        # of two equal codes


def _mix(h, v):
    """As kernel/segments.h: the seed of the segment at element v."""
    mask = (1 << 64) - 1
    h = (h + (v + 1) * 0x9E3779B97F4A7C15) & mask
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 & mask
    h = (h ^ h >> 27) * 0x94D049BB133111EB & mask
    return h ^ h >> 31


def _measure_feedback(table, kernels):
    """Error feedback around a codec: adding the residual before, and updating it afterwards."""
    import cupy

    count = NBYTES // 4
    x, error = (cupy.random.default_rng(seed).standard_normal(count, dtype=cupy.float32) for seed in (1, 2))
    total = cupy.zeros(count, cupy.float32)
    feed, keep = kernels.function("feed_residual_f32"), kernels.function("update_residual_f32")
    times = _times(lambda: _launch(feed, BLOCKS, total, 0, error, x, count))
    _check("feeding errors", total.get(), error.get() + x.get())
    table.line("feed errors of float32", 3 * NBYTES, times)
    table.line("keep what was lost", 3 * NBYTES, _times(lambda: _launch(keep, BLOCKS, total, x, count)))


def _check(what, got, expected):
    if got.tobytes() != expected.tobytes():
        raise SystemExit(f"bench: {what} on the GPU gives other bytes than on the CPU")


def _measure_pack(table, kernels):
    """Packs ResNet-50's gradients into one buffer in one launch, each aligned to 64 bytes."""
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
    times = _times(lambda: _launch(kernel, pieces, spans_on_gpu, len(gradients)))
    table.line(f"pack {len(gradients)} gradients of ResNet-50, {human_nbytes(nbytes)}", 2 * nbytes, times)
    for start, gradient in zip(starts, gradients, strict=False):
        _check("pack", flat[int(start):int(start) + gradient.nbytes].get(), gradient.get())


def _copy_times():
    import cupy

    src, dst = cupy.zeros(NBYTES, cupy.uint8), cupy.zeros(NBYTES, cupy.uint8)
    return _times(lambda: dst.data.copy_from_device_async(src.data, NBYTES, cupy.cuda.get_current_stream()))


def measure_kernels():
    """Prints a table; returns samples for a record."""
    kernels, table = device.Kernels(0), _Table()
    table.line(COPY, 2 * NBYTES, _copy_times())
    _measure_codec(table, kernels, "minmax_uint8", lib.BHVD_CODEC_MINMAX_UINT8, PER_SEGMENT)
    _measure_codec(table, kernels, "sign", lib.BHVD_CODEC_SIGN, PER_SEGMENT // 2)
    _measure_codec(table, kernels, "rotated", lib.BHVD_CODEC_ROTATED2, PER_SEGMENT, option=512 << 8 | 2)
    _measure_feedback(table, kernels)
    _measure_pack(table, kernels)
    return table.samples


def measure_job(sizes):
    """Allreduces of CUDA tensors by the ranks of this job, including the wait, compared with gloo's and the CPU's.

    Prints a line for each size; returns samples for a record.
    """
    import torch
    import torch.distributed as dist

    import bagua_hvd.torch as hvd

    hvd.init()
    store = hvd.broadcast_object(f"{tempfile.mkdtemp()}/store", root_rank=0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=hvd.rank(), world_size=hvd.size())
    gpu = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    samples = {}
    for nbytes in sizes:
        on_gpu = torch.ones(max(1, nbytes // 4), device=gpu)
        on_cpu = on_gpu.cpu()
        runs = {"ours": lambda x=on_gpu: hvd.allreduce(x, op=hvd.Max, name=f"gpu.{x.numel()}"),
                "gloo": lambda x=on_gpu: dist.all_reduce(x, op=dist.ReduceOp.MAX),
                "ours, CPU": lambda x=on_cpu: hvd.allreduce(x, op=hvd.Max, name=f"cpu.{x.numel()}")}
        times = {name: [] for name in runs}
        for _ in range(RUNS + 1):
            for name, run in runs.items():
                hvd.barrier()
                torch.cuda.synchronize(gpu)
                begin = time.perf_counter()
                run()
                torch.cuda.synchronize(gpu)
                times[name].append(time.perf_counter() - begin)
        if hvd.rank() == 0:
            medians = {name: statistics.median(each[1:]) * 1e6 for name, each in times.items()}
            print(f"allreduce of {human_nbytes(nbytes):>8} on {hvd.size()} ranks "
                  + ", ".join(f"{name} {median:.1f} us" for name, median in medians.items()), flush=True)
            samples |= {f"{nbytes} {name}": ("s", each[1:]) for name, each in times.items()}
    dist.destroy_process_group()
    hvd.shutdown()
    return samples


def _newest(**setting):
    runs = records.read("device", **setting)
    return runs[-1] if runs else None


def speeds():
    """The newest run's bandwidths. Records "device"."""
    run = _newest(what="kernels")
    if run is None:
        return "Nothing measured yet."
    samples = {name: (each.unit, each.values) for name, each in run.samples.items()}
    names = [name.removesuffix(": time") for name in samples if name.endswith(": time")]
    found = [(name, *_bandwidth(samples, name)) for name in names]
    lines = [(name, f"{bandwidth:.0f}", f"{share:.0%}") for name, bandwidth, share in found]
    return report.table(("float32", "GB/s", "of the copy"), lines, left=1)


def allreduces(ranks):
    """The newest run's times. Records "device"."""
    run = _newest(what="allreduce", ranks=int(ranks))
    if run is None:
        return "Nothing measured yet."
    sizes = sorted({int(name.split()[0]) for name in run.samples})
    medians = {name: statistics.median(each.values) * 1e6 for name, each in run.samples.items()}
    lines = [(human_nbytes(nbytes), *(f"{medians[f'{nbytes} {kind}']:.0f}" for kind in ("ours", "gloo", "ours, CPU")))
             for nbytes in sizes]
    return report.table(("us", "CUDA tensors", "gloo's", "tensors of the CPU"), lines, left=1)


def main(arguments=None):
    """Runs the program."""
    global NBYTES, RUNS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nbytes", type=int, default=NBYTES, help="of the vector that is copied and encoded")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--folder", default=records.FOLDER, help="of the records")
    args = parser.parse_args(arguments)
    NBYTES, RUNS = args.nbytes, args.runs
    if why := missing():
        raise SystemExit(f"nothing can be measured here: {why}")
    import cupy

    gpu, ranks = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(), job_size()
    if job_rank() == 0:
        print(f"{gpu}, CUDA driver {cupy.cuda.runtime.driverGetVersion()}, CuPy {cupy.__version__}")
    if ranks:
        setting = {"what": "allreduce", "ranks": ranks}
        samples = measure_job([4, 1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26])
    else:
        setting, samples = {"what": "kernels", "nbytes": NBYTES}, measure_kernels()
    if args.record and samples:
        records.append("device", {"gpu": gpu, **setting}, samples, shared=False, folder=args.folder)


if __name__ == "__main__":
    main()
