"""The example of torch.distributed, shortened, on real ranks."""
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_ddp_digits.py"


@pytest.mark.parametrize("options", [
    pytest.param(["--hook", "bytegrad", "--backend", "gloo"], marks=pytest.mark.long), ["--wrap", "decentralized"]])
def test_learns(run_ranks, options):
    results = run_ranks(2, EXAMPLE, arguments=[*options, "--epochs", "8"], env={"GLOO_SOCKET_IFNAME": "lo"})
    backend, accuracy = re.search(r"backend (\w+), test accuracy: ([\d.]+) %", results[0].output).groups()
    assert backend == ("gloo" if "gloo" in options else "bagua") and float(accuracy) >= 94
