"""`python -m bagua_hvd.bench.train` runs real ranks of each backend, and prints a line for each."""
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(300)


@pytest.mark.long
@pytest.mark.parametrize("backends", [
    ["none", "bagua"], pytest.param(["none", "bagua", "gloo", "late", "barrier"], marks=pytest.mark.long),
], ids=["some", "all"])
def test_every_backend_has_its_line(backends):
    command = [sys.executable, "-m", "bagua_hvd.bench.train", "--models", "mlp", "--rounds", "1", "--steps", "2",
               "--warmup-steps", "1", "--backends", *backends]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line[:1] == "|"]
    assert [row[1] for row in cells[2:]] == backends
    for row in cells[2:]:
        assert float(row[2]) > 0 and float(row[4]) <= float(row[3]) <= float(row[5])
    assert cells[2][6] == "-" and all(row[6].endswith("%") for row in cells[3:])


def test_a_job_measures_in_its_own_ranks():
    """A measurement between hosts is only possible within a job."""
    command = [sys.executable, "-m", "bagua_hvd.runner.launch", "-np", "2", sys.executable, "-m",
               "bagua_hvd.bench.train", "--models", "mlp", "--rounds", "1", "--steps", "1", "--warmup-steps", "1",
               "--backends", "none", "bagua", "gloo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if "| mlp" in line]
    assert [row.split("|")[2].strip() for row in rows] == ["none", "bagua", "gloo"]


@pytest.mark.parametrize("option, value", [("--algorithm", "nonsense"), ("--rounds", "0")])
def test_a_wrong_option_is_one_sentence(option, value):
    command = [sys.executable, "-m", "bagua_hvd.bench.train", option, value]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 2 and f"'{value}'" in done.stderr and "Traceback" not in done.stderr
