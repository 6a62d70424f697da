"""Builds bagua_hvd._native: the C core as a static library, and the cffi module over the one public header.

`setup.py` reads `ffibuilder` and `LIBRARIES` from here; the C tests read `SOURCES` and `FLAGS`, so the files are listed
nowhere else. A `_<isa>` suffix on a C file selects its compiler flags.
"""
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).parent
NATIVE = Path("native")
TENSORFLOW = NATIVE / "tensorflow"      # a library of its own, loaded by TensorFlow
HEADER = NATIVE / "include" / "bagua_hvd.h"
INCLUDE_DIRS = [str(NATIVE / "include"), str(NATIVE)]

# -ffp-contract=off: a fused multiply-add would make SIMD and scalar kernels, CPU and GPU, differ in the last bit.
# -fno-trapping-math: nobody asks for the exceptions of what a vector computes and does not choose.
FLAGS = [
    "-std=c11", "-D_GNU_SOURCE", "-O3", "-g", "-Wall", "-Wextra", "-fvisibility=hidden", "-ffp-contract=off",
    "-fno-math-errno", "-fno-trapping-math", "-Werror=implicit-function-declaration",
]
ISA_FLAGS = {
    "avx2": ["-mavx2", "-mf16c", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mf16c", "-mfma"],
}
LINK_LIBRARIES = ["pthread", "m", "dl"]


def _is_gcc():
    if sys.platform != "linux":     # where nothing is built: see require_linux()
        return False
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    try:
        about = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except OSError:
        return False
    return "Free Software Foundation" in about


# A small operation crosses twenty files of the core, which GCC optimizes as one: 4 % of its time. Objects hold code for
# every linker as well. Not by other compilers: what they call LTO asks for a linker and an archiver of their own.
# BHVD_BUILD_LTO=0 spares the time that it takes.
LTO = ["-flto", "-ffat-lto-objects"] if os.environ.get("BHVD_BUILD_LTO") != "0" and _is_gcc() else []
LTO_LINK = [*LTO, "-flto-partition=one", *FLAGS] if LTO else []


def _isa(path):
    return next((isa for isa in ISA_FLAGS if path.stem.endswith("_" + isa)), None)


def _sources():
    """All C files by instruction set; None is the portable code. Without x86 there is only that.

    The machine is the one that is built for: a cross-compiling build says it in _PYTHON_HOST_PLATFORM.
    """
    x86 = sysconfig.get_platform().endswith("-x86_64")
    sources = {None: []}
    for path in sorted((ROOT / NATIVE).rglob("*.c")):
        if ROOT / TENSORFLOW in path.parents:
            continue
        isa = _isa(path)
        if isa is None or x86:
            sources.setdefault(isa, []).append(str(path.relative_to(ROOT)))
    return sources


SOURCES = _sources()

# bhvd_core comes first: it refers to the instruction-set libraries, and static libraries resolve left to right.
HEADERS = [str(path.relative_to(ROOT)) for path in sorted((ROOT / NATIVE).rglob("*.h"))]
LIBRARIES = [
    (
        "bhvd_" + (isa or "core"),
        {
            "sources": files,
            "include_dirs": INCLUDE_DIRS,
            "cflags": FLAGS + ISA_FLAGS.get(isa, []) + LTO,
            "obj_deps": {"": HEADERS},  # any header changed: compile again
        },
    )
    for isa, files in SOURCES.items()
]

# The ops for TensorFlow: a library, no Python module, so that one file serves all versions of Python. No header and no
# library of TensorFlow is needed, so it is always built.
TENSORFLOW_OPS = {
    "name": "bagua_hvd.tensorflow._ops",
    "sources": sorted(str(path.relative_to(ROOT)) for path in (ROOT / TENSORFLOW).glob("*.c")),
    "include_dirs": INCLUDE_DIRS, "extra_compile_args": FLAGS, "libraries": ["pthread", "dl"], "depends": HEADERS,
    "py_limited_api": True,
}

# What the ops of TensorFlow call in Python; see native/tensorflow/core.h.
CALLBACKS = """
extern "Python" int bhvd_python_put(int64_t, int64_t, const struct bhvd_tensor *, void *, struct bhvd_error *);
extern "Python" int bhvd_python_wait(int64_t, struct bhvd_error *);
"""


def declarations():
    """The public header as cffi wants it: without preprocessor lines."""
    return re.sub(r"^#.*$", "", (ROOT / HEADER).read_text(), flags=re.MULTILINE)


# What CuPy compiles when a GPU is found: bagua_hvd/core/device_kernels.py reads it.
DEVICE_SOURCE = Path("bagua_hvd") / "core" / "device_kernels.cu"


def device_source():
    """native/device/kernels.cu with the headers that it shares with C, as one text: NVRTC reads no files."""
    seen = set()

    def lines(path):
        for line in path.read_text().splitlines():
            found = re.match(r'#include (["<])(.*)[">]', line)
            if not found:
                yield line
            elif found[1] == '"' and found[2] not in seen:
                seen.add(found[2])
                yield from lines(ROOT / NATIVE / found[2])

    return "\n".join(lines(ROOT / NATIVE / "device" / "kernels.cu")) + "\n"


def write_device_source():
    if not (ROOT / DEVICE_SOURCE).exists() or (ROOT / DEVICE_SOURCE).read_text() != device_source():
        (ROOT / DEVICE_SOURCE).write_text(device_source())


def require_linux():
    """Ends the build elsewhere: what follows would be a page of the compiler's errors."""
    if sys.platform != "linux":
        sys.exit(f"bagua_hvd runs on Linux; this is {sys.platform}. Its engine stands on futexes and memfd. "
                 "On macOS use a Linux container or virtual machine, on Windows also WSL 2.")


ffibuilder = FFI()
ffibuilder.cdef(declarations() + CALLBACKS)
ffibuilder.set_source(
    "bagua_hvd._native",
    '#include "bagua_hvd.h"',
    include_dirs=[str(NATIVE / "include")],
    libraries=LINK_LIBRARIES,
    extra_link_args=LTO_LINK,
    depends=HEADERS + [path for files in SOURCES.values() for path in files],  # any of them changed: link again
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
