"""When the rate of the links between network namespaces falls, all ranks switch in the same step."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.laboratory.hosts import Hosts, why_impossible

pytestmark = [pytest.mark.long, pytest.mark.timeout(280),
              pytest.mark.skipif(why_impossible() is not None, reason=str(why_impossible()))]


def test_a_rate_that_falls(tmp_path):
    worker = Path(__file__).with_name("rate_worker.py")
    with Hosts(2, "2gbit") as hosts, hosts.job(2) as variables:
        subprocess.run([sys.executable, "-m", "bagua_hvd.runner.launch", "-np", "2", sys.executable, "-m",
                        "tests.laboratory.hosts", sys.executable, str(worker), "50mbit", str(tmp_path)],
                       env={**os.environ, "OMP_NUM_THREADS": "1", **variables}, check=True, timeout=250)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["plans"] == second["plans"]
    before, after = first["plans"][11], first["plans"][-1]
    assert before.startswith("gradient_allreduce") and after.startswith("rotated(2)"), first
    assert "predicted" in first["why"]
