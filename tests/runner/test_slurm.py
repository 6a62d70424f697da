"""An unchanged training script under a real Slurm: `srun -n N python train.py`."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slurm import Slurm, programs

pytest.importorskip("torch")
pytest.importorskip("sklearn")

ROOT = Path(__file__).parents[2]
MISSING = sorted(name for name, path in programs().items() if path is None)
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (apt-get install slurm-wlm)"),
    pytest.mark.skipif(os.getuid() != 0, reason="slurmd needs root")]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)             # munged requires that everybody may enter the folder of its socket
    made = Slurm(folder)
    yield made
    made.close()


@pytest.fixture
def srun(slurm, tmp_path):
    """A function that runs srun with these arguments and a home of the test's own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "BAGUA_", "SLURM_"))}
    environment = {**kept, **slurm.environment, "HOME": str(tmp_path), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1",
                   "PYTHONPATH": str(ROOT), "HOROVOD_START_TIMEOUT": "100"}
    return lambda *command: subprocess.run([slurm.srun, *command], env=environment, capture_output=True, text=True,
                                           timeout=250, cwd=tmp_path)


@pytest.mark.parametrize("ranks", [2, 4])
def test_srun_of_a_training_script(srun, ranks):
    done = srun("-n", str(ranks), sys.executable, str(ROOT / "examples/torch_digits.py"), "--epochs", "2",
                "--algorithm", "bytegrad")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"ranks: {ranks}, algorithm: ByteGrad" in done.stdout
    assert "parameters identical on all ranks: yes" in done.stdout
    assert float(re.search(r"test accuracy: ([\d.]+) %", done.stdout)[1]) > 50


def test_a_rank_that_fails_fails_the_step(srun):
    code = ("import os, bagua_hvd.torch as hvd, torch; hvd.init(); hvd.rank() == 1 and os._exit(3); "
            "hvd.allreduce(torch.ones(2))")
    done = srun("-n", "2", sys.executable, "-c", code)
    assert done.returncode != 0 and "rank 1 was lost" in done.stderr
