"""The kernels for the GPU.

Without a GPU the tests check that NVRTC compiles the source for each architecture, and that the compiled code, run on
the CPU (ptx.py), gives the bytes of the C kernels for all kinds of values and sizes, touches only its own memory, and
has no races. They do not measure its speed on a GPU (docs/gpu.md).
With a GPU and CuPy, the same tests run on it.
"""
import functools
import itertools
import re
import runpy
import subprocess

import numpy as np
import pytest

import nvrtc
from bagua_hvd.core import native
from bagua_hvd.core.device import SOURCE, Kernels
from bagua_hvd.core.native import ffi, lib
from device_arrays import ROOT, emulation, missing_kernels
from kernel_launches import CODED, FIRST, KINDS, SEED, TYPES, Cut, kernel_of, launch_encode, option_of, values
from low_precision import mix

COUNTS = [0, 1, 3, 4, 5, 33, 512, 1027]
LONG = ("sign", "rotated")       # their kernels take more elements per launch than COUNTS has
build = runpy.run_path(str(ROOT / "build.py"))


# -------------------------------------------------------------------------------------------------------- compilation


def test_the_source_is_what_was_built():
    assert SOURCE.read_text() == build["device_source"](), "run setup.py again"
    assert "#include" not in SOURCE.read_text()


@pytest.mark.parametrize("architecture", [
    *(pytest.param(older, marks=pytest.mark.long) for older in ("sm_70", "sm_80")), "sm_90"])
def test_nvrtc_compiles(architecture):
    if nvrtc.library() is None:
        pytest.skip("no NVRTC: install nvidia-cuda-nvrtc-cu12")
    if not nvrtc.knows(architecture):
        pytest.skip(f"this NVRTC does not know {architecture}")
    ptx = nvrtc.compiled(SOURCE.read_text(), architecture).ptx
    assert sorted(re.findall(r"\.entry (\w+)\(", ptx)) == sorted(kernel_names())
    assert "fma." not in ptx, "a fused multiply-add rounds otherwise than the CPU"


# ---------------------------------------------------------------------------------------------------------- emulation


@functools.cache
def kernel_names():
    """The names of all kernels, from the macros in the preprocessed source."""
    command = ["nm", "-D", "--defined-only", str(emulation().path)]
    names = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line.split("emulate_")[1] for line in names.stdout.splitlines() if "emulate_" in line]


def launch_on_gpu(name, blocks, threads, *arguments):
    """The same on the GPU: copies the arrays there and back, with the same misalignment as here."""
    import cupy

    moved = {}
    for position, array in enumerate(arguments):
        if isinstance(array, np.ndarray):
            room = cupy.zeros(array.nbytes + 64, cupy.uint8)
            begin = array.ctypes.data % 64
            moved[position] = room[begin:begin + array.nbytes]
            moved[position].set(array.view(np.uint8))
    words = [moved[i].data.ptr if i in moved else a for i, a in enumerate(arguments)]
    if blocks:
        gpu_kernels().function(name)((blocks,), (threads,), tuple(
            np.float64(word) if isinstance(word, float) else np.uint64(word) for word in words))
    for position, there in moved.items():
        arguments[position].view(np.uint8)[:] = there.get()


@functools.cache
def gpu_kernels():
    return Kernels(0)


@pytest.fixture(params=["emulation", "gpu"])
def launch(request):
    """Runs a kernel: launch(name, blocks, threads, arguments...)."""
    if request.param == "emulation":
        return emulation().launch
    if missing_kernels():
        pytest.skip(missing_kernels())
    return launch_on_gpu


def pointer(array):
    return ffi.cast("void *", array.ctypes.data)


def bytes_equal(got, expected):
    np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("codec", CODED, ids=lambda codec: f"{codec.name}{codec.parameter or ''}")
@np.errstate(all="ignore")
def test_codecs(launch, type, codec):
    """Encodes all kinds of values in all segmentations, decodes them, and sums over the ranks."""
    kernel, storage = kernel_of(codec), TYPES[type].storage
    sizes = [(count, ways) for count in COUNTS for ways in ((1, 512), (3, 512))] + [(1027, (2, 64))]
    # ... and more work than blocks of threads, so that blocks loop.
    cases = [*itertools.product(KINDS, sizes),
             *itertools.product(("normal", "nan"), [(20_001, (1, 1 << 18))] if kernel in LONG else [])]
    for kind, (count, (pieces, segment)) in cases:
        if not count:
            continue
        cut, src = Cut(codec, type, count, pieces, segment), values(type, count, kind, offset=count % 2)
        threads = 32 if count < 20_000 else 256
        codes = launch_encode(launch, cut, src, threads=threads)
        decoded, wanted = np.zeros(count, storage), np.zeros(count, storage)
        written = np.zeros(codes.size, bool)
        for part, at in cut.parts():
            expected = codec.encode(cut.dtype, src[part], mix(SEED, FIRST + part.start))
            bytes_equal(codes[at:at + expected.size], expected)
            written[at:at + expected.size] = True
            wanted[part] = codec.round_trip(cut.dtype, src[part], mix(SEED, FIRST + part.start))
        assert (codes[~written] == 0xAB).all()
        chunk_stride, segment_stride = cut.strides
        launch(f"{kernel}_decode_{type}", cut.grid(2), threads, decoded, codes, chunk_stride, segment_stride, count,
               pieces, segment, 2, option_of(codec))
        bytes_equal(decoded, wanted)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("codec", CODED[:-1], ids=lambda codec: codec.name)
@np.errstate(all="ignore")
def test_decode_sum(launch, type, codec):
    """The mean of four ranks' codes, of a vector in several segments, rounded to the dtype."""
    element = TYPES[type]
    for count, factor in itertools.product((1, 33, 1027), (1.0, 0.25)):
        cut = Cut(codec, type, count, 1, 512)
        rank_stride, segment_stride = cut.strides
        codes, total = np.zeros(4 * rank_stride, np.uint8), np.zeros(count, np.float32)
        for rank, kind in enumerate(["normal", "constant", "zeros", "nan" if count == 33 else "offset"]):
            src = values(type, count, kind)
            for part, at in cut.parts():
                code = codec.encode(cut.dtype, src[part], rank)
                codes[rank * rank_stride + at:][:code.size] = code
                into = ffi.cast("float *", total[part].ctypes.data)
                assert lib.bhvd_decode_add(codec.number, element.dtype, into, pointer(code), part.stop - part.start,
                                           codec.options(0)) == native.OK
        got = np.full(count, 7, element.storage)
        launch(f"{kernel_of(codec)}_decode_sum_{type}", cut.grid(2), 32, got, codes, rank_stride,
               segment_stride, 4, count, 512, 2, factor, option_of(codec))
        bytes_equal(got, element.store(total * np.float32(factor)))


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("codec", CODED[:-1], ids=lambda codec: codec.name)
@np.errstate(all="ignore")
def test_decode_add(launch, type, codec):
    """Adds to float32 values, some infinite, in several segments and unaligned."""
    for count, kind in itertools.product((1, 33, 1027), ("normal", "nan", "zeros")):
        cut = Cut(codec, type, count, 1, 512)
        chunk_stride, segment_stride = cut.strides
        codes, src = np.zeros(chunk_stride, np.uint8), values(type, count, kind)
        got = values("f32", count, "inf", offset=count % 2)
        wanted = got.copy()
        for part, at in cut.parts():
            code = codec.encode(cut.dtype, src[part], 5)
            codes[at:][:code.size] = code
            into = ffi.cast("float *", wanted[part].ctypes.data)
            assert lib.bhvd_decode_add(codec.number, TYPES[type].dtype, into, pointer(code), part.stop - part.start,
                                       codec.options(0)) == native.OK
        launch(f"{kernel_of(codec)}_decode_add_{type}", cut.grid(2), 32, got, codes, chunk_stride,
               segment_stride, count, 1, 512, 2, option_of(codec))
        bytes_equal(got, wanted)


@pytest.mark.parametrize("type", TYPES)
@np.errstate(all="ignore")
def test_error_feedback(launch, type):
    """encoder_encode of native/primitive/encoder.c, before and after the codec."""
    element = TYPES[type]
    for count, kind in itertools.product(COUNTS, ("normal", "nan", "huge")):
        src, error = values(type, count, kind, offset=1), values("f32", count, "normal")
        total = error + element.load(src).astype(np.float32)
        sums, rounded = np.zeros(count, np.float32), np.zeros(count, element.storage)
        launch(f"feed_residual_{type}", 2, 64, sums, 0 if type == "f32" else rounded, error, src, count)
        np.testing.assert_array_equal(sums, total)
        if type != "f32":
            np.testing.assert_array_equal(element.load(rounded), element.load(element.store(total)))
        decoded = values(type, count, "offset")
        lost = total - element.load(decoded).astype(np.float32)
        launch(f"update_residual_{type}", 2, 64, sums, decoded, count)
        bytes_equal(sums, np.where(np.isfinite(lost), lost, np.float32(0)))


@pytest.mark.parametrize("count", COUNTS)
def test_scale(launch, count):
    """Products are rounded to float32 as in NumPy; of float16 and bfloat16 then to the dtype."""
    f = np.float32
    for type, factor in itertools.product(TYPES, (0.1, -3.0)):
        element, x = TYPES[type], values(type, count, "normal", offset=1)
        out = np.zeros_like(x)
        launch(f"scale_{type}", 2, 64, out, x, factor, count)
        bytes_equal(out, x * factor if type == "f64" else element.store(element.load(x).astype(f) * f(factor)))


def test_copy_spans():
    """Hundreds of spans of all alignments in one launch, which writes nothing between them."""
    rng = np.random.default_rng(1)
    sizes = [1, 3, 16, 17, 16384, 16385, 40000, *rng.integers(1, 3000, 150)]
    sources = [rng.integers(0, 256, size + 3, np.uint8)[i % 4:][:size] for i, size in enumerate(sizes)]
    dst = np.full(sum(sizes) + 8 * len(sizes), 0xAB, np.uint8)
    expected = dst.copy()
    table = np.zeros((len(sizes), 4), np.uint64)
    at = pieces = 0
    for i, source in enumerate(sources):
        table[i] = source.ctypes.data, dst.ctypes.data + at, source.size, pieces
        expected[at:at + source.size] = source
        pieces += -(-source.size // 16384)
        at += source.size + i % 8
    emulation().launch("copy_spans", pieces, 64, table, len(sizes), reachable=(*sources, dst))
    bytes_equal(dst, expected)
