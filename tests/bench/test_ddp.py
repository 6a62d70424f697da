"""The benchmark of DistributedDataParallel measures every way."""
import subprocess
import sys

import pytest

pytest.importorskip("torch")


@pytest.mark.long
def test_every_way_has_a_line():
    done = subprocess.run([sys.executable, "-m", "bagua_hvd.bench.ddp", "--rounds", "1", "--steps", "2"],
                          capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line[:24].strip() for line in done.stdout.splitlines()] == [
        "gloo", "bagua", "gloo, bytegrad hook", "bagua, bytegrad hook"]
