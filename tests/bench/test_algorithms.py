"""The benchmark of the algorithms runs; its figures are the machine's."""
import subprocess
import sys

import pytest

pytest.importorskip("torch")


@pytest.mark.timeout(240)
@pytest.mark.long
def test_every_algorithm_has_its_line():
    names = ["none", "gradient_allreduce", "bytegrad", "async"]
    command = [sys.executable, "-m", "bagua_hvd.bench.algorithms", "--parameters", "1000000", "--steps", "2",
               "--rounds", "1", "--seconds", "0.2", "--algorithms", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()[-len(names):]}
    assert list(rows) == names
    assert float(rows["none"][-1]) == 0
    # Two ranks: N float32 each way, and an eighth of twice that.
    assert float(rows["gradient_allreduce"][-1]) == pytest.approx((1024**2 + 1024) * 4 / 1024, rel=0.02)
    assert float(rows["bytegrad"][-1]) == pytest.approx((1024**2 + 1024) / 1024, rel=0.02)
