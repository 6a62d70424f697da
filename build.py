"""Builds bagua_hvd._native: the C core as a static library, and the cffi module over the one public header.

`setup.py` reads `ffibuilder` and `LIBRARIES` from here; the C tests read `SOURCES` and `FLAGS`, so the files are listed
nowhere else. A `_<isa>` suffix on a C file selects its compiler flags.
"""
import platform
import re
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).parent
NATIVE = Path("native")
HEADER = NATIVE / "include" / "bagua_hvd.h"
INCLUDE_DIRS = [str(NATIVE / "include"), str(NATIVE)]

# -ffp-contract=off: a fused multiply-add would make SIMD and scalar kernels, CPU and GPU, differ in the last bit.
FLAGS = [
    "-std=c11", "-D_GNU_SOURCE", "-O3", "-g", "-Wall", "-Wextra", "-fvisibility=hidden", "-ffp-contract=off",
    "-fno-math-errno", "-Werror=implicit-function-declaration",
]
ISA_FLAGS = {
    "avx2": ["-mavx2", "-mf16c", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mf16c", "-mfma"],
}
LINK_LIBRARIES = ["pthread", "m"]


def _isa(path):
    return next((isa for isa in ISA_FLAGS if path.stem.endswith("_" + isa)), None)


def _sources():
    """All C files by instruction set; None is the portable code. Without x86 there is only that."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    sources = {None: []}
    for path in sorted((ROOT / NATIVE).rglob("*.c")):
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
            "cflags": FLAGS + ISA_FLAGS.get(isa, []),
            "obj_deps": {"": HEADERS},  # any header changed: compile again
        },
    )
    for isa, files in SOURCES.items()
]


def declarations():
    """The public header as cffi wants it: without preprocessor lines."""
    return re.sub(r"^#.*$", "", (ROOT / HEADER).read_text(), flags=re.MULTILINE)


ffibuilder = FFI()
ffibuilder.cdef(declarations())
ffibuilder.set_source(
    "bagua_hvd._native",
    '#include "bagua_hvd.h"',
    include_dirs=[str(NATIVE / "include")],
    libraries=LINK_LIBRARIES,
    depends=HEADERS + [path for files in SOURCES.values() for path in files],  # any of them changed: link again
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
