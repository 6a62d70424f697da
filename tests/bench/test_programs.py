"""Every program of the benchmarks says what it can do."""
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bagua_hvd.bench

FOLDER = Path(bagua_hvd.bench.__file__).parent
PARSES = re.compile(r"^    parser = .*Parser\(", re.MULTILINE)
PROGRAMS = sorted(".".join(path.relative_to(FOLDER.parents[1]).with_suffix("").parts).removesuffix(".__main__")
                  for path in FOLDER.rglob("*.py")
                  if PARSES.search(text := path.read_text()) and '__name__ == "__main__"' in text)

pytestmark = pytest.mark.timeout(120)


def test_programs_are_found():
    assert {"bagua_hvd.bench", "bagua_hvd.bench.laboratory", "bagua_hvd.bench.records"} <= set(PROGRAMS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_help(program):
    done = subprocess.run([sys.executable, "-m", program, "--help"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout.startswith("usage:"), done.stderr[-500:]
