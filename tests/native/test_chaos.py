"""Repeats the chaos test of test_loss.c: a rank is killed among mixed operations, and the others start a new job."""
from pathlib import Path

import pytest

import native_programs

RUNS = {"plain": 50, "asan": 10}


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("configuration", RUNS)
def test_chaos(configuration):
    unavailable, prefix, environment = native_programs.runner(configuration)
    if unavailable:
        pytest.skip(unavailable)
    program = native_programs.program(configuration, Path(__file__).parent / "test_loss.c")
    done = native_programs.run([*prefix, program, "chaos"], BHVD_CHAOS_RUNS=str(RUNS[configuration]), **environment)
    assert done.returncode == 0, done.stdout
