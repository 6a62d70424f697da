"""Runs every tests/native/test_*.c, plain and with sanitizers.

BHVD_NATIVE_CONFIGURATIONS selects other configurations, as `make asan`, `make tsan` and `make ubsan` do.
"""
import os
import subprocess
from pathlib import Path

import pytest

import native_programs

HERE = Path(__file__).parent
STAND_INS = [HERE.parent / "device" / name for name in ("fake_cuda.c", "fake_nccl.c")]
CONFIGURATIONS = os.environ.get("BHVD_NATIVE_CONFIGURATIONS", "").split()
# `make test` runs these without AddressSanitizer, which makes them ten to thirty times slower, and all others with it.
# Python's tests of primitives, codecs and two levels cover the same code.
SLOW = ["test_codecs", "test_hierarchy", "test_interleavings", "test_interleavings_tree", "test_nccl_hierarchical",
        "test_primitives"]
# A minute under TSan, which finds nothing with one thread; `make tsan` still runs them.
ONE_THREAD = ["test_codecs", "test_faults", "test_heartbeat", "test_interleavings", "test_interleavings_tree",
              "test_kernels", "test_pairwise", "test_schedules", "test_stall", "test_waits"]
TESTS = sorted(HERE.glob("test_*.c"))


def configurations(test):
    """pytest.params; all but one are only for `make test-long`."""
    if CONFIGURATIONS:
        return [pytest.param(test, name, id=f"{test.stem}-{name}") for name in CONFIGURATIONS]
    short = "asan" if test.stem not in SLOW else None
    return [pytest.param(test, name, id=f"{test.stem}-{name}", marks=[] if name == short else [pytest.mark.long])
            for name in ("plain", "asan", *([] if test.stem in ONE_THREAD else ["tsan"]))]


def run(test, configuration):
    """The CompletedProcess, or a sentence if the configuration is unavailable."""
    unavailable, prefix, environment = native_programs.runner(configuration)
    if unavailable:
        return unavailable
    program = native_programs.program(configuration, test)
    if '"gpu_jobs.h"' in test.read_text():
        native_programs.shared_library(configuration, "fake_cuda.so", STAND_INS)
    return native_programs.run([*prefix, program], **environment)


@pytest.mark.timeout(900)       # the first test of a configuration compiles the core
@pytest.mark.parametrize("test, configuration", [one for test in TESTS for one in configurations(test)])
def test_native(test, configuration):
    try:
        done = run(test, configuration)
        if isinstance(done, str):
            pytest.skip(done)
    except subprocess.TimeoutExpired as expired:
        output = (expired.stdout or b"").decode(errors="replace")
        pytest.fail(f"{test.stem} ({configuration}) ran past {native_programs.RUN_SECONDS} s:\n{output}", pytrace=False)
    if done.returncode:
        pytest.fail(f"{test.stem} ({configuration}) ended with {done.returncode}:\n{done.stdout}", pytrace=False)
