"""Builds bagua_hvd._native: the C core as a static library, and the cffi module over the one public header.

`setup.py` reads `ffibuilder` and `LIBRARIES` from here; the C tests read `SOURCES` and `FLAGS`, so the files are listed
nowhere else. A C file with the suffix `_kernels` is compiled once more for each instruction set, with its name as ISA.

In this folder this file shadows the package `build` of `python -m build`, so run as a program it says what to type.
"""
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from keyword import iskeyword
from pathlib import Path

if __name__ == "__main__":
    sys.exit("This is bagua_hvd's build.py, not the package build: write `python -P -m build` (Python 3.11 or newer), "
             "or `pyproject-build`.")

from cffi import FFI
from pycparser import CParser, c_ast

ROOT = Path(__file__).parent
NATIVE = Path("native")
TENSORFLOW = NATIVE / "tensorflow"      # a library of its own, loaded by TensorFlow
HEADER = NATIVE / "include" / "bagua_hvd.h"
INCLUDE_DIRS = [str(NATIVE / "include"), str(NATIVE)]

VERSION_FILE = Path("bagua_hvd") / "core" / "version.py"
VERSION = re.search(r'__version__ = "(.*)"', (ROOT / VERSION_FILE).read_text())[1]
# -ffp-contract=off: a fused multiply-add would make SIMD and scalar kernels, CPU and GPU, differ in the last bit.
# -fno-trapping-math: floating-point exceptions of unused vector lanes do not matter.
# -falign-loops: else the speed of a short loop depends on where other code happens to place it.
FLAGS = [
    "-std=c11", "-D_GNU_SOURCE", "-O3", "-g", "-Wall", "-Wextra", "-fvisibility=hidden", "-ffp-contract=off",
    "-fno-math-errno", "-fno-trapping-math", "-falign-loops=64", "-Werror=implicit-function-declaration",
    f"-DBHVD_VERSION={VERSION}",
]
ISA_FLAGS = {
    "avx2": ["-DISA=avx2", "-mavx2", "-mf16c", "-mfma"],
    "avx512": ["-DISA=avx512", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mf16c", "-mfma"],
}
LINK_LIBRARIES = ["pthread", "m", "dl"]


def _is_gcc():
    if sys.platform != "linux":     # nothing is built there: see require_linux()
        return False
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    try:
        about = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except OSError:
        return False
    return "Free Software Foundation" in about


# A small operation runs through twenty files of the core; with LTO, GCC saves 4 % of its time. The objects also hold
# code for linkers without LTO. Only GCC: LTO of other compilers needs their own linker and archiver. BHVD_BUILD_LTO=0
# saves the build time of LTO.
LTO = ["-flto", "-ffat-lto-objects"] if os.environ.get("BHVD_BUILD_LTO") != "0" and _is_gcc() else []
LTO_LINK = [*LTO, "-flto-partition=one", *FLAGS] if LTO else []


def _sources():
    """All C files by instruction set; None is the portable code. Without x86 there is only portable code.

    The target machine decides: a cross-compiling build names it in _PYTHON_HOST_PLATFORM.
    """
    x86 = sysconfig.get_platform().endswith("-x86_64")
    sources = {None: []}
    for path in sorted((ROOT / NATIVE).rglob("*.c")):
        if ROOT / TENSORFLOW in path.parents:
            continue
        for isa in [None, *(ISA_FLAGS if x86 and path.stem.endswith("_kernels") else [])]:
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
            "obj_deps": {"": [*HEADERS, str(VERSION_FILE)]},  # compile again if one of these changes
        },
    )
    for isa, files in SOURCES.items()
]

# The ops for TensorFlow: a library, not a Python module, so that one file serves all versions of Python. It needs no
# headers or libraries of TensorFlow, so it is always built.
TENSORFLOW_OPS = {
    "name": "bagua_hvd.tensorflow._ops",
    "sources": [*sorted(str(path.relative_to(ROOT)) for path in (ROOT / TENSORFLOW).glob("*.c")),
                str(NATIVE / "base" / "block_pool.c")],
    "include_dirs": INCLUDE_DIRS, "extra_compile_args": FLAGS, "libraries": ["pthread", "dl"], "depends": HEADERS,
    "py_limited_api": True,
}

# Python functions that a context (core/context.py) and the ops of TensorFlow (native/tensorflow/core.h) call.
CALLBACKS = """
extern "Python" bhvd_status bhvd_python_gather(void *, const void *, int, void *, struct bhvd_proofs *,
                                               struct bhvd_error *);
extern "Python" int bhvd_python_put(int64_t, int64_t, const struct bhvd_tensor *, void *, struct bhvd_error *);
extern "Python" int bhvd_python_wait(int64_t, struct bhvd_error *);
"""


def declarations():
    """The public header in the form that cffi accepts: without preprocessor lines."""
    return re.sub(r"^#.*$", "", (ROOT / HEADER).read_text(), flags=re.MULTILINE)


# CuPy compiles this source when a GPU is found: bagua_hvd/core/device.py reads it.
DEVICE_SOURCE = Path("bagua_hvd") / "core" / "device_kernels.cu"


def device_source():
    """native/device/kernels.cu with the headers that it shares with C, as one text: NVRTC does not read files."""
    seen = set()

    def lines(path):
        for line in path.read_text().splitlines():
            found = re.match(r'#include (["<])(.*)[">]', line)
            if not found and line != "#pragma once":
                yield line
            elif found and found[1] == '"' and found[2] not in seen:
                seen.add(found[2])
                yield from lines(ROOT / NATIVE / found[2])

    return "\n".join(lines(ROOT / NATIVE / "device" / "kernels.cu")) + "\n"


def write_device_source():
    if not (ROOT / DEVICE_SOURCE).exists() or (ROOT / DEVICE_SOURCE).read_text() != device_source():
        (ROOT / DEVICE_SOURCE).write_text(device_source())


# For mypy: the functions and constants of bagua_hvd._native, with the header's types.
STUB = Path("bagua_hvd") / "_native.pyi"
STUB_HEAD = '''"""Made by build.py from native/include/bagua_hvd.h."""
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

class CData:
    """What C owns or points to."""
    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: Any) -> None: ...
    def __getitem__(self, index: Any) -> Any: ...
    def __setitem__(self, index: Any, value: Any) -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...
    def __int__(self) -> int: ...
    def __bool__(self) -> bool: ...
    def __add__(self, count: int) -> CData: ...
    def __sub__(self, other: Any) -> Any: ...
    def __call__(self, *arguments: Any) -> Any: ...
    def __enter__(self) -> CData: ...
    def __exit__(self, *raised: object) -> None: ...

class CType:
    cname: str
    def __getattr__(self, name: str) -> Any: ...

Pointer: TypeAlias = CData | bytes | Sequence[Any] | Mapping[str, Any]

class FFI:
    NULL: CData
    error: type[Exception]
    def addressof(self, data: Any, *fields: str | int) -> CData: ...
    def buffer(self, data: CData, size: int = ...) -> Any: ...
    def cast(self, ctype: str | CType, value: Any) -> CData: ...
    def def_extern(self, name: str = ..., error: Any = ..., onerror: Any = ...) -> Callable[[Any], Any]: ...
    def from_handle(self, data: CData) -> Any: ...
    def from_buffer(self, ctype: Any, buffer: Any = ..., require_writable: bool = ...) -> CData: ...
    def gc(self, data: CData, destructor: Callable[[CData], Any] | None, size: int = ...) -> CData: ...
    def memmove(self, dst: Any, src: Any, size: int) -> None: ...
    def new(self, ctype: str | CType, init: Any = ...) -> CData: ...
    def new_handle(self, data: object) -> CData: ...
    def release(self, data: CData) -> None: ...
    def sizeof(self, data: CData | str | CType) -> int: ...
    def string(self, data: CData, maxlen: int = ...) -> bytes: ...
    def typeof(self, data: Any) -> CType: ...

class _Lib:
    bhvd_python_gather: CData
'''
C_TYPES = "typedef int int32_t, int64_t, uint32_t, uint64_t, uint8_t, uint16_t, uintptr_t, size_t;"


def stub():
    """The text of `STUB`."""
    def python_type(node, result):
        if isinstance(node, c_ast.PtrDecl):
            return "CData" if result else "Pointer"
        if isinstance(node, c_ast.ArrayDecl):
            return "Pointer"
        names = getattr(node.type, "names", ["int"])    # an enum has no names
        if isinstance(node.type, c_ast.Struct):
            return "CData"
        return {"void": "None", "double": "float", "float": "float"}.get(names[-1], "int")

    constants, functions = [], []
    for declared in CParser().parse(C_TYPES + re.sub(r"/\*.*?\*/", "", declarations(), flags=re.DOTALL)).ext:
        if isinstance(declared.type, c_ast.FuncDecl):
            parameters = [each for each in declared.type.args.params if each.name]     # (void) has no parameters
            arguments = "".join(f"{each.name}{'_' * iskeyword(each.name)}: {python_type(each.type, False)}, "
                                for each in parameters)
            functions.append(f"    def {declared.name}(self, {arguments + '/' if arguments else ''}) -> "
                             f"{python_type(declared.type.type, True)}: ...\n".replace("(self, )", "(self)"))
        enum = getattr(declared.type, "type", declared.type)
        if isinstance(enum, c_ast.Enum):
            constants += [f"    {each.name}: Final" + (f" = {each.value.value}\n" if each.value else "[int]\n")
                          for each in enum.values.enumerators]
    return STUB_HEAD + "".join(constants + functions) + "\nffi: FFI\nlib: _Lib\n"


def write_stub():
    if not (ROOT / STUB).exists() or (ROOT / STUB).read_text() != stub():
        (ROOT / STUB).write_text(stub())


def require_linux():
    """Ends the build on other systems, where a page of compiler errors would follow."""
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
    depends=HEADERS + [path for files in SOURCES.values() for path in files],  # link again if any of them changes
)
