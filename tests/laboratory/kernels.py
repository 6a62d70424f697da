"""The cost of each kernel of native/device/kernels.cu per float32 element, counted without a GPU, in Markdown.

    python -m tests.laboratory.kernels [--nvdisasm PATH]

NVRTC's code runs on the CPU (tests/support/ptx.py), on COUNT elements in the core's segments. Columns: PTX
instructions; bytes read and written; the bytes of the 32-byte sectors that warps touch for them, as a multiple (1.00:
coalesced); and the minimum time on an H100, by memory (3.35 TB/s) and by instructions (132 processors, each 128 a cycle
of 1.755 GHz). These are bounds, not measurements. With nvdisasm (package nvidia-cuda-nvdisasm) also, for the machine
code for sm_90: instructions, and single-byte loads among them.
"""
import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from bagua_hvd.core.device import SOURCE

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import nvrtc  # noqa: E402
from device_arrays import Emulation  # noqa: E402
from kernel_launches import CODED, Cut, kernel_of, option_of, values  # noqa: E402

COUNT, SEGMENT, THREADS, RANKS, SPANS = 1 << 17, 1 << 16, 256, 4, 64
MEASURED = ("minmax_uint8", "sign", "rotated2")
MEMORY, ISSUED = 3.35e12, 132 * 128 * 1.755e9


def _launches(codec):
    """(kernel, arguments for counting it) of a codec: encode, decode, mean of RANKS ranks' codes, add."""
    cut, src = Cut(codec, "f32", COUNT, 1, SEGMENT), values("f32", COUNT, "normal")
    name, (chunk, segment), option = kernel_of(codec), cut.strides, option_of(codec)
    codes, out = np.zeros(RANKS * chunk, np.uint8), np.zeros(COUNT, np.float32)
    ranges = np.zeros(COUNT, np.uint8)
    steps = ["minmax_uint8_ranges"] if name == "minmax_uint8" else []
    per_block = 4096 if name in ("minmax_uint8", "rotated") else 8192
    steps.append(f"{name}_encode")
    steps += [f"{name}_header"] if name in ("sign", "rotated") else []
    for step in steps:
        blocks = 1 if step.endswith("header") else SEGMENT // per_block
        yield step, cut.grid(blocks), (codes, chunk, segment, src, COUNT, 1, SEGMENT, blocks, ranges, option, 9, 0)
    blocks = SEGMENT // 4096
    for rank in range(1, RANKS):
        codes[rank * chunk:(rank + 1) * chunk] = codes[:chunk]
    yield f"{name}_decode", cut.grid(blocks), (out, codes, chunk, segment, COUNT, 1, SEGMENT, blocks, option)
    yield f"{name}_decode_add", cut.grid(blocks), (out, codes, chunk, segment, COUNT, 1, SEGMENT, blocks, option)
    mean = (codes, chunk, segment, RANKS, COUNT, SEGMENT, blocks, 0.25, option)
    yield f"{name}_decode_sum", cut.grid(blocks), (out, *mean)
    if codec.rotates:
        yield "rotated_reencode", cut.grid(blocks), (np.zeros(chunk, np.uint8), *mean, 9, 0)


def _spans(src, dst):
    """The elements in SPANS spans of equal size."""
    nbytes = src.nbytes // SPANS
    table = np.zeros((SPANS, 4), np.uint64)
    for i in range(SPANS):
        table[i] = src.ctypes.data + i * nbytes, dst.ctypes.data + i * nbytes, nbytes, i
    return SPANS, (table, SPANS)


def _others():
    a, b, c, d = (values("f32", COUNT, "normal") for _ in range(4))
    grid = COUNT // (4 * THREADS)
    yield "copy_spans", *_spans(a, b)
    yield "scale", grid, (a, b, 0.5, COUNT)
    yield "feed_residual", grid, (a, 0, b, c, COUNT)
    yield "update_residual", grid, (a, b, COUNT)
    yield "mix", grid, (a, b, c, d, 0, 0.5, 0.25, 0.25, 0.0, COUNT)


def _machine_code(nvdisasm):
    """By kernel: (instructions, single-byte loads) for sm_90."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(nvrtc.compiled(SOURCE.read_text(), "sm_90").cubin)
        file.flush()
        text = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=True).stdout
    found = {}
    for part in text.split(".section\t.text.")[1:]:
        code = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]+)", part)
        loads = sum(op.startswith("LDG") and ".U8" in op for op in code)
        found[re.match(r"\w+", part)[0]] = (sum(op != "NOP" for op in code), loads)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvdisasm", help="its path")
    args = parser.parse_args()
    kernels, machine = Emulation(counts=True), _machine_code(args.nvdisasm) if args.nvdisasm else {}
    print("| kernel (float32) | instructions | bytes | sectors | by memory, ps | by instructions, ps | "
          "sm_90: instructions, byte loads |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    codecs = {codec.name: codec for codec in CODED[:-1] if codec.name in MEASURED}
    for launches in (_others(), *map(_launches, codecs.values())):
        for name, grid, arguments in launches:
            kernels.counts()
            symbol = name if name == "copy_spans" else f"{name}_f32"
            kernels.launch(symbol, grid, THREADS, *arguments, everywhere=True)
            seen = kernels.counts()
            nbytes, sectors = (seen[f"{kind}_read"] + seen[f"{kind}_written"] for kind in ("bytes", "sectors"))
            instructions = seen["instructions"] / COUNT
            code = "{}, {}".format(*machine.get(symbol, "--"))
            by_memory, by_issue = 32e12 * sectors / COUNT / MEMORY, 1e12 * instructions / ISSUED
            print(f"| {name} | {instructions:.1f} | {nbytes / COUNT:.2f} | {32 * sectors / nbytes:.2f} | "
                  f"{by_memory:.2f} | {by_issue:.2f} | {code} |", flush=True)


if __name__ == "__main__":
    main()
