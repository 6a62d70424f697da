"""Fuzzes the parsers of received bytes: replays the corpora, then mutates them, seeded.

`make test` runs it briefly, with the address and undefined behaviour sanitizers; `make fuzz` for FUZZ_SECONDS or
FUZZ_RUNS executions per target, whichever is first, guided by the coverage of new inputs.
"""
import os
from pathlib import Path

import pytest

import native_programs

HERE = Path(__file__).parent
LONG = "FUZZ_SECONDS" in os.environ
SECONDS = int(os.environ.get("FUZZ_SECONDS", 2))
RUNS = int(os.environ.get("FUZZ_RUNS", 10_000_000))
SEED = int(os.environ.get("FUZZ_SEED", 1))
CONFIGURATION = "fuzz" if LONG else "asan"      # "asan" is already built for tests/native


@pytest.mark.timeout(900 + 2 * SECONDS)     # the first one compiles the core
@pytest.mark.parametrize("target", sorted(HERE.glob("target_*.c")), ids=lambda path: path.stem[len("target_"):])
def test_fuzz(target, tmp_path):
    unavailable, prefix, environment = native_programs.runner(CONFIGURATION)
    if unavailable:
        pytest.skip(unavailable)
    program = native_programs.program(CONFIGURATION, target, [HERE / "driver.c"])
    corpus = HERE / "corpus" / target.stem.removeprefix("target_")
    done = native_programs.run([*prefix, program, SECONDS, RUNS, SEED, corpus, tmp_path], SECONDS + 600, **environment)
    assert done.returncode == 0, done.stdout
    print(done.stdout)
