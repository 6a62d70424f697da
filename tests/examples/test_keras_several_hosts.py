"""The example of Keras on several hosts: killed in the middle, and started again with the same folder."""
import re
import sys
from pathlib import Path

import pytest

from launcher import wait_until

pytest.importorskip("sklearn")
pytest.importorskip("keras")

EXAMPLE = Path(__file__).parents[2] / "examples" / "keras_several_hosts.py"
EPOCHS = 40         # many more than pass until the signal is sent


@pytest.mark.timeout(240)
@pytest.mark.parametrize("backend", ["tensorflow", pytest.param("torch", marks=pytest.mark.long)])
def test_goes_on_where_it_was(launcher, backend):
    pytest.importorskip(backend)
    folder, output = launcher.folder / "shared", launcher.folder / "output"
    job = [sys.executable, EXAMPLE, "--folder", folder, "--algorithm", "bytegrad", "--epochs"]
    env = {"OMP_NUM_THREADS": "1", "KERAS_BACKEND": backend}
    with open(output, "wb") as file:
        popen = launcher.start("-np", 2, *job, EPOCHS, env=env, stdout=file, stderr=file)
        wait_until(lambda: f"Epoch 4/{EPOCHS}" in output.read_text(), 100)
        popen.terminate()
        assert popen.wait(60) != 0
    assert (folder / "backup" / "latest.weights.h5").exists()

    reached = max(int(number) for number in re.findall(r"Epoch (\d+)/", output.read_text()))
    result = launcher.run("-np", 2, *job, reached + 2, env=env)
    assert result.returncode == 0, result.stderr
    first = int(re.search(r"Epoch (\d+)/", result.stdout)[1])
    # The signal may have come while the backup was written.
    assert 1 < first and reached - 1 <= first <= reached + 1
    assert float(re.search(rf"{backend}, 2 ranks: .* accuracy ([\d.]+) %", result.stdout)[1]) >= 90
    assert int(re.search(r"written after step (\d+)", result.stdout)[1]) % 23 == 0
    assert not (folder / "backup").exists()     # a training that has ended needs none
