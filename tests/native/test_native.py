"""Compiles the native core and every tests/native/test_*.c, plain and under the sanitizers, and runs the programs.

Files and flags come from build.py. Objects are kept under build/native-tests/<configuration>/ and compiled anew only
when they, a header they include, or their flags changed.
"""
import fcntl
import functools
import os
import runpy
import shlex
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
pytest.importorskip("cffi", reason="build.py needs cffi")
build = SimpleNamespace(**runpy.run_path(str(ROOT / "build.py")))

RUN_SECONDS = 120
PARALLEL_COMPILES = 2
_SANITIZED = ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
CONFIGURATIONS = {
    "plain": [],
    "asan": ["-fsanitize=address,undefined", *_SANITIZED],
    "tsan": ["-fsanitize=thread", *_SANITIZED],
}
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=1",
    "TSAN_OPTIONS": "halt_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
COMPILER = shlex.split(os.environ.get("CC", "")) or [shutil.which("gcc") or shutil.which("cc") or ""]


@contextmanager
def _locked(folder):
    """One process at a time builds a configuration (pytest-xdist, two developers)."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(output, command, inputs):
    """Runs `command`, which writes `output`, unless it has done so since the last change of `inputs()`, paths."""
    record = output.with_suffix(".command")
    try:
        made = output.stat().st_mtime_ns
        if record.read_text() == shlex.join(command) and all(path.stat().st_mtime_ns < made for path in inputs()):
            return
    except OSError:
        pass
    output.parent.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    started = time.time_ns()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"
    os.utime(output, ns=(started, started))     # what is edited while the compiler runs is newer
    record.write_text(shlex.join(command))


def _compile(folder, source, flags):
    """The object file of `source`, a path relative to the repository."""
    output = folder / Path(source).with_suffix(".o")
    dependencies = output.with_suffix(".d")
    includes = [f"-I{path}" for path in build.INCLUDE_DIRS]
    command = [*COMPILER, *flags, *includes, "-MMD", "-MF", str(dependencies), "-c", str(source), "-o", str(output)]

    def inputs():
        words = dependencies.read_text().replace("\\\n", " ").split()
        return [ROOT / word for word in words if not word.endswith(":")]

    _make(output, command, inputs)
    return output


def _folder(configuration):
    return ROOT / "build" / "native-tests" / configuration


@functools.cache
def _core(configuration):
    """The object files of the native core. A failure is kept too, so that it is waited for once."""
    folder, extra = _folder(configuration), CONFIGURATIONS[configuration]
    jobs = [(source, [*build.FLAGS, *build.ISA_FLAGS.get(isa, []), *extra])
            for isa, sources in build.SOURCES.items() for source in sources]
    with _locked(folder), ThreadPoolExecutor(PARALLEL_COMPILES) as pool:
        futures = [pool.submit(_compile, folder, source, flags) for source, flags in jobs]
        errors = [str(future.exception()) for future in futures if future.exception()]
        return [] if errors else [future.result() for future in futures], errors


def _program(configuration, test):
    objects, errors = _core(configuration)
    assert not errors, "the native core does not compile:\n" + "\n".join(errors)
    folder, extra = _folder(configuration), CONFIGURATIONS[configuration]
    with _locked(folder):
        main = _compile(folder, test.relative_to(ROOT), [*build.FLAGS, *extra])
        program = folder / test.stem
        libraries = [f"-l{name}" for name in build.LINK_LIBRARIES]
        command = [*COMPILER, *extra, str(main), *map(str, objects), *libraries, "-o", str(program)]
        _make(program, command, lambda: [main, *objects])
    return program


def _run(command, **environment):
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT, **environment}, timeout=RUN_SECONDS,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")


@functools.cache
def _runner(configuration):
    """(None, the words before a program's name, its environment), or (why the configuration cannot run here, ...)."""
    if not COMPILER[0]:
        return "no C compiler (gcc or cc) on this machine", [], {}
    folder = _folder(configuration)
    with _locked(folder):
        source, program = folder / "probe.c", folder / "probe"
        source.write_text("int main(void) { return 0; }\n")
        done = subprocess.run([*COMPILER, *CONFIGURATIONS[configuration], str(source), "-o", str(program)],
                              capture_output=True, text=True)
        if done.returncode:
            return f"this compiler has no {configuration}: {done.stderr.strip()[-200:]}", [], {}
        # Kernels with much address randomization stop ThreadSanitizer; LeakSanitizer does not run under ptrace.
        without_randomization = ["setarch", "-R"] if shutil.which("setarch") else []
        for prefix, environment in [([], {}), (without_randomization, {}), ([], {"ASAN_OPTIONS": "detect_leaks=0"})]:
            output = _run([*prefix, str(program)], **environment)
            if output.returncode == 0:
                return None, prefix, environment
    return f"{configuration} programs do not start here: {output.stdout.strip()[-200:]}", [], {}


@pytest.mark.timeout(900)       # the first test of a configuration compiles the core
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("test", sorted(HERE.glob("test_*.c")), ids=lambda path: path.stem)
def test_native(test, configuration):
    unavailable, prefix, environment = _runner(configuration)
    if unavailable:
        pytest.skip(unavailable)
    program = _program(configuration, test)
    try:
        done = _run([*prefix, str(program)], **environment)
    except subprocess.TimeoutExpired as expired:
        output = (expired.stdout or b"").decode(errors="replace")
        pytest.fail(f"{test.stem} ({configuration}) ran past {RUN_SECONDS} s:\n{output}", pytrace=False)
    if done.returncode:
        pytest.fail(f"{test.stem} ({configuration}) ended with {done.returncode}:\n{done.stdout}", pytrace=False)
