"""The example of islands: DiLoCo between islands learns as much as averaged gradients, with 1/64 of the traffic."""
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed.fsdp")

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_fsdp_islands.py"


def run(algorithm):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", EXAMPLE,
               "--steps", "200", "--algorithm", algorithm]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    loss, sent = re.search(r"held-out loss ([\d.]+), (\d+) KiB", result.stdout).groups()
    return float(loss), int(sent)


@pytest.mark.long
@pytest.mark.timeout(420)       # two runs
def test_learns_as_with_averages(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    averaged, all_of_it = run("gradient_allreduce")
    local, sent = run("diloco")
    assert averaged < 2.6 and abs(local - averaged) < 0.1 * averaged
    assert all_of_it / 70 < sent < all_of_it / 50
