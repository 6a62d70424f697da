"""Lightning's example, shortened, with ranks that Lightning starts; and the other name of the package."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning")
pytest.importorskip("sklearn")

ROOT = Path(__file__).parents[2]


def run(*command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                   "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=110, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "sync_dist" not in result.stderr
    return result.stdout


@pytest.mark.parametrize("options", [["--strategy", "bagua_bytegrad"], ["--weighted"]])
def test_lightning_starts_two_processes(options):
    output = run(str(ROOT / "examples/lightning_digits.py"), "--devices", "2", "--epochs", "5", *options)
    ranks, accuracy = re.search(r"(\d) ranks, test accuracy: ([\d.]+) %", output).groups()
    assert ranks == "2" and float(accuracy) >= 90


def test_pytorch_lightning_of_the_old_name():
    pytest.importorskip("pytorch_lightning")
    output = run("-c", "import pytorch_lightning as pl; import bagua_hvd.lightning as ours; "
                       "assert issubclass(ours.BaguaStrategy, pl.strategies.DDPStrategy); "
                       "print(pl.Trainer(strategy='bagua_onebit_adam', accelerator='cpu', logger=False).strategy)")
    assert "BaguaStrategy" in output
