"""The elastic digits example, shortened, on two names of this host, one of which is removed."""
import re
import sys
from pathlib import Path

import pytest

from launcher import wait_until

pytest.importorskip("torch")
pytest.importorskip("sklearn")

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_elastic_digits.py"
EPOCHS = 40         # seconds more than the ranks need to learn of the removed host


@pytest.mark.timeout(300)
def test_trains_on_without_a_host(launcher):
    hosts, script = launcher.folder / "hosts", launcher.folder / "discover.sh"
    hosts.write_text("localhost:1\n127.0.0.2:1\n")
    script.write_text(f"#!/bin/sh\ncat '{hosts}'\n")
    script.chmod(0o755)
    output = launcher.folder / "output"
    with open(output, "wb") as file:
        popen = launcher.start("--min-np", 1, "--host-discovery-script", script, sys.executable, EXAMPLE,
                               "--epochs", EPOCHS, env={"OMP_NUM_THREADS": "1"}, stdout=file, stderr=file)
        wait_until(lambda: f"epoch 2 of {EPOCHS}, 2 ranks" in output.read_text(), 100)
        fewer = hosts.with_suffix(".part")      # renamed, because the script may read at any time
        fewer.write_text("localhost:1\n")
        fewer.replace(hosts)
        assert popen.wait(150) == 0, output.read_text()
    text = output.read_text()
    assert "the job continues with size 1, on localhost." in text
    assert float(re.findall(rf"epoch {EPOCHS} of {EPOCHS}, 1 ranks: test accuracy ([\d.]+) %", text)[0]) >= 95
