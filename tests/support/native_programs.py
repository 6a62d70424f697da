"""Compiles C programs with the native core, plain and with sanitizers, and runs them.

Files and flags come from build.py. Objects are kept in build/native-tests/<configuration>/, and are recompiled only if
they, a header they include, or their flags have changed. The core is an archive, so a program that includes a C file of
the core, for access to its static functions, replaces that file.

For another processor: CC is a cross compiler, _PYTHON_HOST_PLATFORM tells build.py `linux-aarch64`, and
BHVD_NATIVE_RUNNER is the emulator, such as `qemu-aarch64-static -L /usr/aarch64-linux-gnu`.
"""
import functools
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from locks import locked

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("cffi", reason="build.py needs cffi")
build = SimpleNamespace(**runpy.run_path(str(ROOT / "build.py")))

RUN_SECONDS = 600       # a sanitizer on a busy machine is slow; a test that hangs takes as long
PARALLEL_COMPILES = 2
COMPILER = shlex.split(os.environ.get("CC", "")) or [shutil.which("gcc") or shutil.which("cc") or ""]
EMULATOR = shlex.split(os.environ.get("BHVD_NATIVE_RUNNER", ""))
_SANITIZED = ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
CONFIGURATIONS = {
    "plain": [],
    "asan": ["-fsanitize=address,undefined", *_SANITIZED],
    "tsan": ["-fsanitize=thread", *_SANITIZED],
    # Has more checks, and finds errors that the other sanitizers' memory layout hides.
    "ubsan": ["-fsanitize=undefined,float-cast-overflow", *_SANITIZED],
    "fuzz": ["-fsanitize=address,undefined", "-fsanitize-coverage=trace-pc", *_SANITIZED],
    "coverage": ["--coverage", "-fprofile-update=atomic", "-O0"],
}
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1",
    "TSAN_OPTIONS": "halt_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def _make(output, command, inputs):
    """Runs `command`, which writes `output`, unless `output` is newer than `inputs()`, paths."""
    record = output.with_suffix(".command")
    try:
        made = output.stat().st_mtime_ns
        if record.read_text() == shlex.join(command) and all(path.stat().st_mtime_ns < made for path in inputs()):
            return
    except OSError:
        pass
    output.parent.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    output.unlink(missing_ok=True)
    started = time.time_ns()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"
    os.utime(output, ns=(started, started))     # a file edited during the compilation is newer
    record.write_text(shlex.join(command))


def _compile(configuration, source, flags, isa=None):
    """The object file of `source`, a path relative to the repository, compiled for an instruction set."""
    output = folder_of(configuration) / Path(source).with_suffix(f".{isa}.o" if isa else ".o")
    dependencies = output.with_suffix(".d")
    includes = [f"-I{path}" for path in build.INCLUDE_DIRS]
    command = [*COMPILER, *flags, *includes, "-MMD", "-MF", str(dependencies), "-c", str(source), "-o", str(output)]

    def inputs():
        words = dependencies.read_text().replace("\\\n", " ").split()
        return [ROOT / word for word in words if not word.endswith(":")]

    _make(output, command, inputs)
    return output


def folder_of(configuration):
    """The folder of a configuration's programs and objects."""
    return ROOT / "build" / "native-tests" / configuration


@functools.cache
def core(configuration):
    """(the archive of the native core, None), or (None, the compiler's errors); errors are cached, too."""
    extra = CONFIGURATIONS[configuration]
    jobs = [(source, [*build.FLAGS, *build.ISA_FLAGS.get(isa, []), *extra], isa)
            for isa, sources in build.SOURCES.items() for source in sources]
    archive = folder_of(configuration) / "core.a"
    with locked(folder_of(configuration)), ThreadPoolExecutor(PARALLEL_COMPILES) as pool:
        futures = [pool.submit(_compile, configuration, *job) for job in jobs]
        errors = [str(future.exception()) for future in futures if future.exception()]
        if errors:
            return None, "the native core does not compile:\n" + "\n".join(errors)
        objects = [future.result() for future in futures]
        _make(archive, ["ar", "rcs", str(archive), *map(str, objects)], lambda: objects)
        return archive, None


def program(configuration, source, helpers=()):
    """The path of the program, rebuilt if needed.

    Args:
        source: path of the C file with main, or with functions that a helper's main calls.
        helpers: paths of more C files, compiled without coverage.
    """
    archive, errors = core(configuration)
    assert not errors, errors
    extra = CONFIGURATIONS[configuration]
    with locked(folder_of(configuration)):
        objects = [_compile(configuration, source.relative_to(ROOT), [*build.FLAGS, *extra])]
        objects += [_compile(configuration, helper.relative_to(ROOT),
                             [*build.FLAGS, *(flag for flag in extra if "coverage" not in flag)]) for helper in helpers]
        output = folder_of(configuration) / source.stem
        libraries = [f"-l{name}" for name in build.LINK_LIBRARIES]
        command = [*COMPILER, *extra, *map(str, objects), str(archive), *libraries, "-o", str(output)]
        _make(output, command, lambda: [*objects, archive])
    return output


def shared_library(configuration, name, sources):
    """The path of a shared library `name` beside the programs, rebuilt if needed. sources: paths."""
    extra = CONFIGURATIONS[configuration]
    with locked(folder_of(configuration)):
        objects = [_compile(configuration, source.relative_to(ROOT), [*build.FLAGS, "-fPIC", *extra])
                   for source in sources]
        output = folder_of(configuration) / name
        command = [*COMPILER, *extra, "-shared", *map(str, objects), "-pthread", "-lm", "-o", str(output)]
        _make(output, command, lambda: objects)
    return output


@functools.cache
def sanitized_module():
    """(None, the path of the module with address and undefined behaviour sanitizers), or (the reason, None)."""
    unavailable, _, _ = runner("asan")
    if unavailable:
        return unavailable, None
    output = folder_of("asan") / "module"
    flags = shlex.join(CONFIGURATIONS["asan"])
    with locked(folder_of("asan")):
        command = [sys.executable, "setup.py", "-q", "build_clib", "-t", output / "temp", "-b", output / "clib",
                   "build_ext", "-t", output / "temp", "-b", output]
        done = subprocess.run([*map(str, command)], cwd=ROOT, env={**os.environ, "CFLAGS": flags, "LDFLAGS": flags},
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return None, output / "bagua_hvd" / "_native.abi3.so"


def run(command, seconds=RUN_SECONDS, **environment):
    """The CompletedProcess of a program, with both output streams as text."""
    return subprocess.run(list(map(str, command)), cwd=ROOT, env={**os.environ, **ENVIRONMENT, **environment},
                          timeout=seconds, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace")


@functools.cache
def runner(configuration):
    """(None, the prefix of the program's command, its environment), or (why the configuration cannot run here, ...)."""
    if not COMPILER[0]:
        return "no C compiler (gcc or cc) on this machine", [], {}
    folder = folder_of(configuration)
    with locked(folder):
        source, probe = folder / "probe.c", folder / "probe"
        source.write_text("int main(void) { return 0; }\n")
        # The coverage callbacks of a fuzzer's driver are missing here.
        flags = [flag for flag in CONFIGURATIONS[configuration] if "coverage=" not in flag]
        done = subprocess.run([*COMPILER, *flags, str(source), "-o", str(probe)], capture_output=True, text=True)
        if done.returncode:
            return f"this compiler has no {configuration}: {done.stderr.strip()[-200:]}", [], {}
        # Strong address randomization in the kernel stops ThreadSanitizer, but not every time, so one successful start
        # proves nothing. LeakSanitizer does not run under ptrace.
        fixed = [(["setarch", "-R"], {})] if configuration == "tsan" and shutil.which("setarch") else []
        for prefix, environment in [*fixed, (EMULATOR, {}), (EMULATOR, {"ASAN_OPTIONS": "detect_leaks=0"})]:
            output = run([*prefix, probe], **environment)
            if output.returncode == 0:
                return None, prefix, environment
    return f"{configuration} programs do not start here: {output.stdout.strip()[-200:]}", [], {}
