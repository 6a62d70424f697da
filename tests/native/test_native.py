"""Runs every tests/native/test_*.c, plain and under the sanitizers.

BHVD_NATIVE_CONFIGURATIONS chooses other configurations; `make asan`, `make tsan` and `make ubsan` do so.
"""
import os
import subprocess
from pathlib import Path

import pytest

import native_programs

HERE = Path(__file__).parent
STAND_INS = [HERE.parent / "device" / name for name in ("fake_cuda.c", "fake_nccl.c")]
CONFIGURATIONS = os.environ.get("BHVD_NATIVE_CONFIGURATIONS", "plain asan tsan").split()


@pytest.mark.timeout(900)       # the first test of a configuration compiles the core
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("test", sorted(HERE.glob("test_*.c")), ids=lambda path: path.stem)
def test_native(test, configuration):
    unavailable, prefix, environment = native_programs.runner(configuration)
    if unavailable:
        pytest.skip(unavailable)
    program = native_programs.program(configuration, test)
    if '"gpu_jobs.h"' in test.read_text():
        native_programs.library(configuration, "fake_cuda.so", STAND_INS)
    try:
        done = native_programs.run([*prefix, program], **environment)
    except subprocess.TimeoutExpired as expired:
        output = (expired.stdout or b"").decode(errors="replace")
        pytest.fail(f"{test.stem} ({configuration}) ran past {native_programs.RUN_SECONDS} s:\n{output}", pytrace=False)
    if done.returncode:
        pytest.fail(f"{test.stem} ({configuration}) ended with {done.returncode}:\n{done.stdout}", pytrace=False)
