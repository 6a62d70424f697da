"""The kernels for the GPU.

Two things can be known without one: that NVRTC compiles the source for each architecture; and that the very same
source, compiled for the CPU by emulation.cpp, gives the bytes of the C kernels, for all kinds of values and sizes.
That is an emulation of the arithmetic: what a GPU does with it, and how fast, is not measured here (docs/gpu.md).
Where there is a GPU, and CuPy, it runs the same tests.
"""
import ctypes
import functools
import glob
import importlib.util
import itertools
import re
import runpy
import subprocess

import numpy as np
import pytest

from bagua_hvd.common import device_kernels, native
from bagua_hvd.common.device_kernels import OPTIONS, SOURCE
from bagua_hvd.common.native import ffi, lib
from device_arrays import ROOT, Emulation, missing_gpu
from elements import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

COUNTS = [0, 1, 3, 4, 5, 33, 512, 1027]
TYPES = {"f32": FLOAT32, "f64": FLOAT64, "f16": FLOAT16, "bf16": BFLOAT16}
build = runpy.run_path(str(ROOT / "build.py"))


# -------------------------------------------------------------------------------------------------------- compilation


@functools.cache
def nvrtc():
    """NVRTC of the package nvidia-cuda-nvrtc-*, which needs no GPU."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in glob.glob(f"{folder}/**/libnvrtc.so.*", recursive=True):
            if "alt" not in path:
                return ctypes.CDLL(path)
    return None


def test_the_source_is_what_was_built():
    assert SOURCE.read_text() == build["device_source"](), "run setup.py again"
    assert "#include" not in SOURCE.read_text()


@pytest.mark.parametrize("architecture", ["sm_70", "sm_80", "sm_90"])
def test_nvrtc_compiles(architecture):
    if nvrtc() is None:
        pytest.skip("no NVRTC: install nvidia-cuda-nvrtc-cu12")
    supported, count = (ctypes.c_int * 64)(), ctypes.c_int()
    assert nvrtc().nvrtcGetNumSupportedArchs(ctypes.byref(count)) == 0
    assert nvrtc().nvrtcGetSupportedArchs(supported) == 0
    if int(architecture[3:]) not in supported[:count.value]:
        pytest.skip(f"this NVRTC does not know {architecture}")
    program = ctypes.c_void_p()
    source = SOURCE.read_text().encode()
    assert nvrtc().nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None) == 0
    options = [f"--gpu-architecture={architecture}".encode(), *(option.encode() for option in OPTIONS)]
    code = nvrtc().nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    assert code == 0, _text(program, "nvrtcGetProgramLog")
    ptx = _text(program, "nvrtcGetPTX")
    assert sorted(re.findall(r"\.entry (\w+)\(", ptx)) == sorted(kernel_names())
    assert "fma." not in ptx, "a fused multiply-add rounds otherwise than the CPU"


def _text(program, function):
    size = ctypes.c_size_t()
    assert getattr(nvrtc(), f"{function}Size")(program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(size.value)
    assert getattr(nvrtc(), function)(program, text) == 0
    return text.value.decode()


# ---------------------------------------------------------------------------------------------------------- emulation


@functools.cache
def emulation():
    return Emulation()


@functools.cache
def kernel_names():
    """Of all kernels: what the preprocessor makes of the macros in the source."""
    names = subprocess.run(["nm", "-D", "--defined-only", emulation().path], capture_output=True, text=True, check=True)
    return [line.split("emulate_")[1] for line in names.stdout.splitlines() if "emulate_" in line]


def launch_on_gpu(name, blocks, threads, *arguments):
    """The same on the GPU: arrays go there and come back, and lie there as far off the alignment of vectors as here."""
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
    return device_kernels.Kernels(0)


@pytest.fixture(params=["emulation", "gpu"])
def launch(request):
    """Runs a kernel: launch(name, blocks, threads, arguments...)."""
    if request.param == "emulation":
        return emulation().launch
    if missing_gpu():
        pytest.skip(missing_gpu())
    return launch_on_gpu


def pointer(array):
    return ffi.cast("void *", array.ctypes.data)


def bytes_equal(got, expected):
    np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))


def values(type, count, kind, offset=0):
    """An array of `count` elements, `offset` elements past an address at which vectors may lie."""
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


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_minmax_uint8(launch, type, kind):
    codec, dtype = lib.BHVD_CODEC_MINMAX_UINT8, TYPES[type].dtype
    for count, chunks, (per_chunk, threads) in itertools.product(COUNTS, (1, 3), ((1, 32), (3, 16))):
        src = values(type, count, kind, offset=count % 2)
        stride = lib.bhvd_encoded_size(codec, dtype, lib.bhvd_chunk_count(count, chunks), ffi.NULL)
        ranges, codes = np.zeros(chunks * per_chunk * 24, np.uint8), np.full(chunks * stride, 0xAB, np.uint8)
        grid = chunks * per_chunk
        launch(f"minmax_uint8_ranges_{type}", grid, threads, ranges, src, count, chunks, per_chunk)
        launch(f"minmax_uint8_encode_{type}", grid, threads, codes, stride, src, ranges, count, chunks, per_chunk)
        begin = 0
        for k in range(chunks):
            n = count // chunks + (k < count % chunks)
            size = lib.bhvd_encoded_size(codec, dtype, n, ffi.NULL)
            expected = np.full(stride, 0xAB, np.uint8)
            part = src[begin:begin + n]
            assert lib.bhvd_encode(codec, dtype, pointer(expected), pointer(part), n, ffi.NULL) == native.OK
            got = codes[k * stride:(k + 1) * stride]
            bytes_equal(got[:size], expected[:size])
            assert (got[size:] == 0xAB).all()
            decoded, wanted = np.zeros_like(part), np.zeros_like(part)
            launch(f"minmax_uint8_decode_{type}", 2, 32, decoded, got, n)
            assert lib.bhvd_decode(codec, dtype, pointer(wanted), pointer(expected), n, ffi.NULL) == native.OK
            bytes_equal(decoded, wanted)
            begin += n


@pytest.mark.parametrize("type", TYPES)
def test_minmax_uint8_decode_sum(launch, type):
    codec, dtype = lib.BHVD_CODEC_MINMAX_UINT8, TYPES[type].dtype
    for count in COUNTS:
        stride = lib.bhvd_encoded_size(codec, dtype, count, ffi.NULL)
        codes = np.zeros(4 * stride, np.uint8)
        expected = np.zeros(count, np.float32)
        for rank, kind in enumerate(["normal", "constant", "zeros", "nan" if count % 2 else "offset"]):
            code, src = codes[rank * stride:(rank + 1) * stride], values(type, count, kind)
            assert lib.bhvd_encode(codec, dtype, pointer(code), pointer(src), count, ffi.NULL) == native.OK
            assert lib.bhvd_decode_add(codec, dtype, ffi.cast("float *", expected.ctypes.data), pointer(code), count,
                                       ffi.NULL) == native.OK
        got = np.full(count, 7, np.float32)
        launch(f"minmax_uint8_decode_sum_{type}", 2, 64, got, codes, stride, 4, count)
        bytes_equal(got, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_qsgd(launch, kind):
    codec = lib.BHVD_CODEC_QSGD
    for count, levels in itertools.product(COUNTS, (1, 7, 127)):
        src = values("f32", count, kind)
        options = ffi.new("struct bhvd_codec_options *", {"parameter": levels, "seed": 99 + count})
        size = lib.bhvd_encoded_size(codec, native.FLOAT32, count, options)
        got, expected = np.full(size, 0xAB, np.uint8), np.full(size, 0xAB, np.uint8)
        assert lib.bhvd_encode(codec, native.FLOAT32, pointer(expected), pointer(src), count, options) == native.OK
        launch("qsgd_encode_f32", (count + 511) // 512, 64, got, src, count, levels, 99 + count)
        launch("qsgd_header_f32", 1, 32, got, count, levels)
        bytes_equal(got, expected)
        decoded, wanted = np.zeros_like(src), np.zeros_like(src)
        launch("qsgd_decode_f32", 2, 64, decoded, got, count)
        assert lib.bhvd_decode(codec, native.FLOAT32, pointer(wanted), pointer(expected), count, options) == native.OK
        bytes_equal(decoded, wanted)


def _with_feedback(codec, type, src, error, options):
    """Code, and error afterwards, by the C codec: encoder_encode of native/primitive/encoder.c, step by step."""
    element = TYPES[type]
    if error is not None:
        total = error + element.load(src).astype(np.float32)
    value = src if error is None else element.store(total)
    code = np.zeros(lib.bhvd_encoded_size(codec, element.dtype, src.size, options), np.uint8)
    assert lib.bhvd_encode(codec, element.dtype, pointer(code), pointer(value), src.size, options) == native.OK
    if error is None:
        return code, None
    decoded = np.zeros_like(src)
    assert lib.bhvd_decode(codec, element.dtype, pointer(decoded), pointer(code), src.size, options) == native.OK
    lost = total - element.load(decoded).astype(np.float32)
    return code, np.where(np.isfinite(lost), lost, np.float32(0))


BITS = {"sign": lib.BHVD_CODEC_SIGN, "sign_rms": lib.BHVD_CODEC_SIGN_RMS, "ternary": lib.BHVD_CODEC_TERNARY}


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("codec", BITS)
@np.errstate(all="ignore")
def test_codecs_of_bits(launch, type, codec):
    """sign, sign_rms and ternary: segments of 512 elements, with and without error feedback, decoded, and summed."""
    number, dtype, segment, kernel = BITS[codec], TYPES[type].dtype, 512, codec.removesuffix("_rms")
    for kind, count, feeds in itertools.product(("normal", "nan", "huge", "zeros"), (33, 1027),
                                                 (False, True)):
        src = values(type, count, kind)
        error = values("f32", count, "normal") if feeds else None
        segments = -(-count // segment)
        seeds = np.arange(segments, dtype=np.uint64) * np.uint64(77) + np.uint64(5)
        stride = lib.bhvd_encoded_size(number, dtype, segment, ffi.NULL)
        codes, after = np.full(segments * stride, 0xAB, np.uint8), None if error is None else error.copy()
        launch(f"{kernel}_encode_{type}", segments, 64, codes, stride, src, 0 if after is None else after, count,
               segment, seeds if codec == "ternary" else int(codec == "sign_rms"))
        decoded, wanted = np.zeros_like(src), np.zeros_like(src)
        launch(f"{kernel}_decode_{type}", 2, 32, decoded, codes, stride, count, segment)
        for s in range(segments):
            part = slice(s * segment, min(count, (s + 1) * segment))
            options = ffi.new("struct bhvd_codec_options *", {"seed": int(seeds[s])})
            expected, lost = _with_feedback(number, type, src[part], None if error is None else error[part], options)
            got = codes[s * stride:(s + 1) * stride]
            bytes_equal(got[:expected.size], expected)
            assert (got[expected.size:] == 0xAB).all()
            if lost is not None:
                bytes_equal(after[part], lost)
            n = src[part].size
            assert lib.bhvd_decode(number, dtype, pointer(wanted[part]), pointer(expected), n, options) == native.OK
            both, total = np.concatenate([got, got]), np.zeros(n, np.float32)
            for _ in range(2):
                assert lib.bhvd_decode_add(number, dtype, ffi.cast("float *", total.ctypes.data), pointer(expected), n,
                                           options) == native.OK
            summed = np.full(n, 7, np.float32)
            launch(f"{kernel}_decode_sum_{type}", 2, 32, summed, both, stride, 2, n)
            bytes_equal(summed, total)
        bytes_equal(decoded, wanted)


@pytest.mark.parametrize("type", ["f16", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_casts(launch, type, kind):
    codec, dtype = {"f16": lib.BHVD_CODEC_FLOAT16, "bf16": lib.BHVD_CODEC_BFLOAT16}[type], TYPES[type].dtype
    for count, offset in itertools.product(COUNTS, (0, 1)):
        src = values("f32", count, kind, offset)
        got, expected = np.zeros(count, np.uint16), np.zeros(count, np.uint16)
        launch(f"cast_f32_{type}", 2, 64, got, src, count)
        assert lib.bhvd_encode(codec, native.FLOAT32, pointer(expected), pointer(src), count, ffi.NULL) == native.OK
        bytes_equal(got, expected)
        back, wanted = np.zeros(count, np.float32), np.zeros(count, np.float32)
        launch(f"cast_{type}_f32", 2, 64, back, got, count)
        native.pack([native.TensorView(expected.ctypes.data, 0, (count,), dtype, expected)], wanted)
        bytes_equal(back, wanted)


@pytest.mark.parametrize("count", COUNTS)
def test_arithmetic(launch, count):
    """Products and sums one after the other, each rounded to float32, as NumPy does them."""
    a, b, c = (values("f32", count, kind) for kind in ("normal", "offset", "normal"))
    f = np.float32
    for type, factor in itertools.product(("f32", "f64"), (0.1, -3.0)):
        x = values(type, count, "normal", offset=1)
        out = np.zeros_like(x)
        launch(f"scale_{type}", 2, 64, out, x, factor, count)
        bytes_equal(out, x * x.dtype.type(factor))
    x = values("f16", count, "normal")
    out = np.zeros_like(x)
    launch("scale_f16", 1, 64, out, x, 0.1, count)
    bytes_equal(out, (x.astype(f) * f(0.1)).astype(np.float16))
    wide, narrow = np.zeros(count), np.zeros(count, f)
    launch("cast_f32_f64", 2, 64, wide, a, count)
    bytes_equal(wide, a.astype(np.float64))
    launch("cast_f64_f32", 2, 64, narrow, wide / 3, count)
    bytes_equal(narrow, (wide / 3).astype(f))
    m = a.copy()
    launch("momentum", 2, 64, m, b, 0.9, 1 - 0.9, count)
    bytes_equal(m, f(0.9) * a + f(1 - 0.9) * b)
    mean = np.zeros(count, f)
    launch("weighted_average", 2, 64, mean, a, b, 0.25, 0.75, count)
    bytes_equal(mean, f(0.25) * a + f(0.75) * b)
    moved = a.copy()
    launch("apply_delta", 2, 64, moved, b, c, count)
    bytes_equal(moved, a + (b - c))


def test_copy_spans():
    """Hundreds of spans of all alignments in one launch, with nothing written between them."""
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
    emulation().launch("copy_spans", pieces, 64, table, len(sizes))
    bytes_equal(dst, expected)
