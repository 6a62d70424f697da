"""The example of Keras on several hosts is killed in the middle, and restarted with the same folder."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import wait_until

pytest.importorskip("sklearn")
pytest.importorskip("keras")

EXAMPLE = Path(__file__).parents[2] / "examples" / "keras_several_hosts.py"
EPOCHS = 40         # many more than can end before the signal is sent


# Ordinary use of the file: one process without bagua_hvd evaluates it on the test images of all ranks.
EVALUATE = """
import sys
sys.path.insert(0, sys.argv[1])
import keras
from keras_several_hosts import digits
model = keras.models.load_model(sys.argv[2], compile=False)
assert model.layers[0].dtype_policy.name == "mixed_bfloat16" and model.layers[0].kernel.dtype == "float32"
images, labels = digits()[1]
print("correct:", int((model.predict(images, verbose=0).argmax(1) == labels).sum()))
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("hosts", ["one host", pytest.param("two hosts", marks=pytest.mark.long)])
@pytest.mark.parametrize("backend", ["tensorflow", pytest.param("torch", marks=pytest.mark.long)])
def test_goes_on_where_it_was(launcher, backend, hosts, request):
    pytest.importorskip(backend)
    folder, output = launcher.folder / "shared", launcher.folder / "output"
    env = {"OMP_NUM_THREADS": "1", "KERAS_BACKEND": backend, "HOROVOD_START_TIMEOUT": "100"}
    ranks, prefix = ["-np", 2], ()
    if hosts == "two hosts":
        namespaces = request.getfixturevalue("namespaces")
        ranks, prefix = [*ranks, "-H", "h0:1,h1:1"], namespaces.enter(0)
        env.update(namespaces.environment)
    job = [*ranks, sys.executable, EXAMPLE, "--folder", folder, "--algorithm", "bytegrad", "--epochs"]
    with open(output, "wb") as file:
        popen = launcher.start(*job, EPOCHS, env=env, prefix=prefix, stdout=file, stderr=file)
        wait_until(lambda: f"Epoch 4/{EPOCHS}" in output.read_text(), 200)
        popen.terminate()
        assert popen.wait(60) != 0
    wait_until(lambda: not launcher.processes())
    assert (folder / "backup" / "latest.weights.h5").exists()

    reached = max(int(number) for number in re.findall(r"Epoch (\d+)/", output.read_text()))
    result = launcher.run(*job, reached + 2, env=env, prefix=prefix, timeout=200)
    assert result.returncode == 0, result.stderr
    first = int(re.search(r"Epoch (\d+)/", result.stdout)[1])
    # The signal may arrive while the backup is written.
    assert 1 < first and reached - 1 <= first <= reached + 1
    assert float(re.search(rf"{backend}, 2 ranks: .* accuracy ([\d.]+) %", result.stdout)[1]) >= 90
    assert int(re.search(r"written after step (\d+)", result.stdout)[1]) % 23 == 0
    assert not (folder / "backup").exists()     # removed at the end of a training

    # The best epoch since, by the mean of the ranks' accuracies on their halves.
    found = [float(number) for number in re.findall(r"val_accuracy: ([\d.]+)", result.stdout)]
    assert len(found) == reached + 3 - first
    alone = subprocess.run([sys.executable, "-c", EVALUATE, EXAMPLE.parent, folder / "best.keras"], text=True,
                           env={**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": str(EXAMPLE.parents[1])},
                           capture_output=True, timeout=100)
    assert alone.returncode == 0, alone.stderr
    assert abs(int(re.search(r"correct: (\d+)", alone.stdout)[1]) - 360 * max(found)) < 1.5
