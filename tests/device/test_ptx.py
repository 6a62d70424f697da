"""The code compiled by NVRTC, run on the CPU (ptx.py): its results, and the reports of errors that a GPU would hide."""
import re

import numpy as np
import pytest

import nvrtc
from device_arrays import Emulation, emulation
from kernel_launches import CODED, TYPES, Cut, launch_encode, values

pytestmark = pytest.mark.skipif(nvrtc.library() is None, reason="no NVRTC: install nvidia-cuda-nvrtc-cu12")

WARPS = """
extern "C" __global__ void functions(unsigned *bits, float *sums, double *moved, const float *x, unsigned long long all)
{
    const unsigned i = threadIdx.x, lane = i % 32;
    bits[5 * i] = __ballot_sync(0xffffffffu, x[i] < 0);
    bits[5 * i + 1] = __popc(__ballot_sync(0xffffffffu, x[i] < 0)) + 100 * __any_sync(0xffffffffu, x[i] > 2) +
                      1000 * __all_sync(0xffffffffu, x[i] < 3);
    bits[5 * i + 2] = __reduce_or_sync(0xffffffffu, 1u << lane / 2);
    bits[5 * i + 3] = lane < 8 ? __ballot_sync(0xffu, lane & 1) : 7;
    bits[5 * i + 4] = __syncthreads_count(x[i] < 0) + 1000 * __syncthreads_or(i == 40);
    float sum = x[i];
    for (int k = 16; k; k /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, k);
    sums[2 * i] = sum;
    sums[2 * i + 1] = __shfl_sync(0xffffffffu, x[i], 3, 8);
    moved[2 * i] = __shfl_up_sync(0xffffffffu, (double)x[i], 4);
    moved[2 * i + 1] = __shfl_down_sync(0xffffffffu, (double)x[i], 4, 16);
}
"""


def test_warp_functions():
    """Ballots, votes, reductions and shuffles, of two warps with different values."""
    threads = 64
    x = np.random.default_rng(1).uniform(-1, 2.5, threads).astype(np.float32)
    bits, sums, moved = np.zeros((threads, 5), np.uint32), np.zeros((threads, 2), np.float32), np.zeros((threads, 2))
    Emulation(WARPS).launch("functions", 1, threads, bits, sums, moved, x, 0)
    for i, lane, first in ((i, i % 32, i // 32 * 32) for i in range(threads)):
        warp = x[first:first + 32]
        negative = sum(1 << k for k in range(32) if warp[k] < 0)
        votes = int((warp < 0).sum()) + 100 * bool((warp > 2).any()) + 1000
        total = warp.copy()
        for k in (16, 8, 4, 2, 1):
            total = total + total[np.arange(32) ^ k]
        expected = (negative, votes, 0xffff, 0xaa if lane < 8 else 7, int((x < 0).sum()) + 1000)
        assert tuple(int(value) for value in bits[i]) == expected
        assert sums[i, 0] == total[lane] and sums[i, 1] == warp[lane // 8 * 8 + 3]
        assert moved[i, 0] == warp[lane - 4 if lane >= 4 else lane]
        assert moved[i, 1] == warp[lane + 4 if lane % 16 + 4 < 16 else lane]


WRONG = {
    "is not aligned to 4 bytes, at ld.global.f32": "out[i] = *(const float *)((const char *)in + 4 * i + 1);",
    "is not in the kernel's memory, at ld.global.f32": "out[i] = in[i + 1];",
    "is not in the kernel's memory, at st.global.f32": "out[i + 1] = in[i];",
    "race: .* shared memory .* read": "__shared__ float s[64]; s[i] = in[i]; out[i] = s[i ^ 1];",
    "race: .* shared memory .* wrote": "__shared__ float s[64]; s[i / 2] = in[i]; out[i] = s[i / 2];",
    "race: writes global memory .* wrote": "out[0] = in[i];",
    "race: (reads|writes) global memory .* block [01]": "if (blockIdx.x) out[i] = 1; else if (out[i] == 0) in[i] = 2;",
    "thread 1 ends, not bar.sync": "if (i % 2 == 0) __syncthreads(); out[i] = in[i];",
    "comes to another barrier, not bar": "if (i % 2) { __syncthreads(); out[i] = 1; } "
                                         "else { __syncthreads_or(1); out[i] = 2; }",
    "lane 9 of its warp does not come to vote": "if (i % 32 < 9) out[i] = __ballot_sync(0x3ffu, in[i] < 0);",
    "its lane is not in the mask 0x1 of vote": "out[i] = __ballot_sync(1u, in[i] < 0);",
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_would_be_wrong_on_a_gpu(fault):
    source = ('extern "C" __global__ void wrong(float *out, float *in)\n'
              '{ const unsigned i = threadIdx.x; ' + WRONG[fault] + ' }')
    out, x = np.zeros(64, np.float32), np.zeros(64, np.float32)
    with pytest.raises(AssertionError, match=fault):
        Emulation(source).launch("wrong", 2 if "block" in WRONG[fault] else 1, 64, out, x)


def test_what_is_right_on_a_gpu():
    """Shared memory with barriers, or within a warp with warp functions; also after a failed launch."""
    source = """
extern "C" __global__ void right(float *out, float *in)
{
    __shared__ float s[64];
    const unsigned i = threadIdx.x;
    s[i] = in[i];
    __syncwarp();
    const float x = s[i ^ 1];
    __syncthreads();
    s[63 - i] = x;
    __syncthreads();
    out[i] = s[i];
    __syncthreads();
    in[i] = out[63 - i];
}"""
    x = np.arange(64, dtype=np.float32)
    out, expected = np.zeros(64, np.float32), x[np.arange(64) ^ 1]
    kernels = Emulation(source)
    for _ in range(2):
        with pytest.raises(AssertionError, match="not in the kernel's memory"):
            kernels.launch("right", 1, 64, out, np.zeros(63, np.float32))
    kernels.launch("right", 1, 64, out, x)
    np.testing.assert_array_equal(out, expected[::-1])
    np.testing.assert_array_equal(x, expected)


def _without_barrier(kernel, number):
    """The PTX of a single kernel without its bar.sync of this number."""
    def edit(text):
        before, *after = re.split(r"bar\.sync\s+0;", _entry(text, kernel))
        after = [("" if i == number else "bar.sync 0;") + part for i, part in enumerate(after)]
        return text[:text.index(".visible .entry")] + before + "".join(after)
    return edit


def _entry(text, kernel):
    return re.search(rf"\.visible \.entry {kernel}\(.*?\n\}}\n", text, re.DOTALL)[0]


def _barriers(kernel):
    return _entry(nvrtc.compiled(emulation().source, "compute_90").ptx, kernel).count("bar.sync")


# Each kernel with barriers: its codec, and a number of elements in a segment that needs all of them.
WITH_BARRIERS = {"minmax_uint8_ranges": ("minmax_uint8", 1200), "minmax_uint8_encode": ("minmax_uint8", 1200),
                 "sign_header": ("sign", 20_000)}


@pytest.mark.parametrize("kernel", WITH_BARRIERS)
def test_a_barrier_that_is_missing_is_reported(kernel):
    """In the project's kernels: the first barrier, and some later ones."""
    codec, count = WITH_BARRIERS[kernel]
    codec = next(c for c in CODED if c.name == codec)
    cut, src = Cut(codec, "f32", count, 1, 1 << 18), values("f32", count, "normal")
    found = _barriers(f"{kernel}_f32")
    assert found
    for number in range(0, found, max(1, found // 3)):
        without = Emulation(edit=_without_barrier(f"{kernel}_f32", number))

        def launch(name, *arguments, without=without):
            (without if name == f"{kernel}_f32" else emulation()).launch(name, *arguments)

        with pytest.raises(AssertionError, match="race: "):
            launch_encode(launch, cut, src, threads=256)
    assert launch_encode(emulation().launch, cut, src, threads=256).any()


def test_sectors_are_counted():
    """Of a copy by consecutive lanes, and of one whose lanes are 32 elements apart."""
    source = """
extern "C" __global__ void copy(float *out, const float *in, unsigned long long stride)
{
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = in[i * stride % 8192];
}"""
    kernels = Emulation(source, counts=True)
    for stride, sectors in ((1, 8192 // 8), (32, 8192)):
        out, x = np.zeros(8192, np.float32), np.zeros(8192, np.float32)
        room = np.zeros(8192 * 4 + 32, np.uint8)
        begin = -room.ctypes.data % 32
        x = room[begin:begin + 8192 * 4].view(np.float32)
        kernels.launch("copy", 32, 256, out, x, stride)
        counts = kernels.counts()
        assert counts["bytes_read"] == counts["bytes_written"] == 4 * 8192
        assert counts["sectors_read"] == sectors and counts["requests"] == 2 * 256
        assert counts["instructions"] >= 8192 * 4


def test_kinds_of_elements_are_all_translated():
    names = re.findall(r"\.entry (\w+)\(", nvrtc.compiled(emulation().source, "compute_90").ptx)
    for name in names:
        assert emulation().handle(name)
    assert {name.rsplit("_", 1)[1] for name in names if "decode" in name} == set(TYPES)
