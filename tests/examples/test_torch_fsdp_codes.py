"""The example of FSDP2 with codecs reaches the loss of plain FSDP2."""
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_api")

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_fsdp_codes.py"


def run(launcher, *options):
    result = launcher.run("-np", "2", sys.executable, EXAMPLE, "--steps", "40", *options, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    loss, sent = re.search(r"held-out loss ([\d.]+), (\d+) KiB", result.stdout).groups()
    return float(loss), int(sent)


@pytest.mark.long
@pytest.mark.timeout(240)       # two runs
def test_learns_as_without_codes(launcher):
    plain, nothing = run(launcher, "--gradients", "none", "--weights", "none")
    coded, sent = run(launcher)
    assert abs(coded - plain) < 0.05 * plain and plain < 3.5
    assert nothing < 5 and 30 < sent
