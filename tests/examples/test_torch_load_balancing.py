"""The example of unequal samples, shortened: each configuration trains; balance is checked by batches, not by times."""
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_load_balancing.py"


@pytest.mark.parametrize("sampler", [
    pytest.param("plain", marks=pytest.mark.long), "balanced", pytest.param("bounded", marks=pytest.mark.long)])
def test_trains_and_keeps_ranks_equal(launcher, sampler):
    result = launcher.run("-np", "2", sys.executable, EXAMPLE, "--sampler", sampler, "--epochs", "2",
                          "--longest", "200", "--paragraphs", "400", env={"OMP_NUM_THREADS": "1"}, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"ranks: 2, sampler: {sampler}" in result.stdout
    assert "parameters identical on all ranks: yes" in result.stdout
    steps = int(re.search(r"epoch: .* s, (\d+) steps", result.stdout)[1])
    assert steps == 25 if sampler != "bounded" else 1 < steps < 50
    assert float(re.search(r"held out: ([\d.]+) bits", result.stdout)[1]) < 6
