"""The synthetic benchmark, shortened, under the launcher."""
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_synthetic_benchmark.py"
SHORT = ["--batch-size", "4", "--num-warmup-batches", "1", "--num-batches-per-iter", "2", "--num-iters", "2"]


@pytest.mark.parametrize("options", [
    ["--model", "mlp", "--algorithm", "bytegrad"],
    *(pytest.param(options, marks=pytest.mark.long) for options in (
        ["--model", "resnet"], ["--model", "mlp", "--fp16-allreduce"], ["--model", "resnet", "--use-adasum"])),
], ids=" ".join)
def test_measures(launcher, options):
    result = launcher.run("-np", "2", sys.executable, EXAMPLE, *SHORT, *options, timeout=100)
    output = result.stdout
    assert result.returncode == 0, output + result.stderr
    assert f"Model: {options[1]}" in output and "Number of CPUs: 2" in output
    rates = [float(rate) for rate in re.findall(r"Iter #\d+: ([\d.]+) img/sec per CPU", output)]
    assert len(rates) == 2
    mean = float(re.search(r"Img/sec per CPU: ([\d.]+) \+-[\d.]+", output)[1])
    total = float(re.search(r"Total img/sec on 2 CPU\(s\): ([\d.]+) \+-[\d.]+", output)[1])
    assert mean == pytest.approx(sum(rates) / 2, abs=0.2) and total == pytest.approx(2 * mean, abs=0.2)
