"""The character language model, shortened, under the launcher."""
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_char_lm.py"
SHORT = ["--steps", "40", "--batch-size", "16", "--context", "32"]


def run(launcher, *options):
    result = launcher.run("-np", "2", sys.executable, EXAMPLE, *SHORT, *options, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("model, algorithm", [
    ("lstm", "gradient_allreduce"), ("transformer", "bytegrad"),
])
def test_learns_and_keeps_ranks_equal(launcher, model, algorithm):
    output = run(launcher, "--model", model, "--algorithm", algorithm)
    assert f"ranks: 2, model: {model}" in output
    assert "parameters identical on all ranks: yes" in output
    bits, unigram = (float(value) for value in re.findall(r"held out: ([\d.]+) bits per character", output))
    assert bits < unigram - 0.5


def test_is_deterministic(launcher):
    first, second = (
        re.search(r"held out: .*", run(launcher, "--model", "lstm", "--steps", "5"))[0] for _ in range(2)
    )
    assert first == second
