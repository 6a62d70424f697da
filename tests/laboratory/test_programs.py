"""Every program of the laboratory has a --help."""
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ROOT / "bagua_hvd" / "bench", ROOT / "tests" / "laboratory"
PARSES = re.compile(r"^    parser = .*[pP]arser\(", re.MULTILINE)
PROGRAMS = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
                  for folder in FOLDERS for path in folder.rglob("*.py")
                  if PARSES.search(text := path.read_text()) and '__name__ == "__main__"' in text)

pytestmark = pytest.mark.timeout(120)


def test_programs_are_found():
    assert {"bagua_hvd.bench", "bagua_hvd.bench.predict", "bagua_hvd.bench.train", "tests.laboratory",
            "tests.laboratory.step_times", "tests.laboratory.records"} <= set(PROGRAMS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_help(program):
    done = subprocess.run([sys.executable, "-m", program, "--help"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout.startswith("usage:"), done.stderr[-500:]
