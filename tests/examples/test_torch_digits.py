"""The digits example, shortened, on real ranks."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_digits.py"


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("algorithm", [pytest.param("gradient_allreduce", marks=pytest.mark.long), "bytegrad"])
def test_learns_and_keeps_ranks_equal(run_ranks, n, algorithm):
    results = run_ranks(n, EXAMPLE, arguments=["--algorithm", algorithm, "--epochs", "8"], timeout=100)
    output = results[0].output
    assert "parameters identical on all ranks: yes" in output
    assert float(re.search(r"test accuracy: ([\d.]+) %", output)[1]) >= 95
    assert int(re.search(r"bytes sent per step and rank: (\d+)", output)[1]) > 0 or n == 1


@pytest.mark.long
def test_under_the_launcher():
    command = [sys.executable, "-m", "bagua_hvd.runner.launch", "-np", "2", sys.executable, str(EXAMPLE),
               "--epochs", "2", "--algorithm", "bytegrad"]
    root = EXAMPLE.parents[1]
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=root, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "parameters identical on all ranks: yes" in result.stdout
