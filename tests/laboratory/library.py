"""The C part of the laboratory: compiled at its first use, and again after a change of its files."""
import ctypes
import functools
import os
import subprocess
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "native"
LIBRARY = ROOT / "build" / "laboratory.so"


@functools.cache
def library() -> ctypes.CDLL:
    """Loads it. RuntimeError: no C compiler, or it failed."""
    files = [*FOLDER.glob("*.[ch]"), *(ROOT / "native" / "base").glob("*.h")]
    if not LIBRARY.exists() or LIBRARY.stat().st_mtime < max(file.stat().st_mtime for file in files):
        LIBRARY.parent.mkdir(exist_ok=True)
        part = LIBRARY.with_name(f"laboratory.{os.getpid()}")       # others may compile it at the same time
        compiler = os.environ.get("CC") or (sysconfig.get_config_var("CC") or "cc").split()[0]
        command = [compiler, "-std=c11", "-D_GNU_SOURCE", "-O3", "-shared", "-fPIC", "-pthread", "-I", FOLDER, "-I",
                   ROOT / "native", "-I", ROOT / "native" / "include", "-o", part, *sorted(FOLDER.glob("*.c"))]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the laboratory's library does not compile: {done.stderr}")
        part.replace(LIBRARY)
    return ctypes.CDLL(str(LIBRARY))
