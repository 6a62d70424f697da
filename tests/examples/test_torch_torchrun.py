"""examples/torch_torchrun.py under torchrun: the result of a training whose workers are killed."""
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import wait_until

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
BEGINS = re.compile(r"process (\d+), rank (\d): begins with step (\d+)")
RANKS = 3


def start(folder, output):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS, "--max-restarts", "5",
               ROOT / "examples/torch_torchrun.py", "--steps", 1000, "--folder", folder]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOROVOD_START_TIMEOUT": "200"}
    return subprocess.Popen([sys.executable, *map(str, command)], env=environment, stdout=output,
                            stderr=subprocess.STDOUT)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_no_complete_step_is_lost(tmp_path):
    files = [tmp_path / "undisturbed.txt", tmp_path / "killed.txt"]

    def begun():
        return BEGINS.findall(files[1].read_text())

    def has_made_steps():
        """Whether all ranks have made steps since their last start."""
        text = files[1].read_text()
        return len(begun()) == RANKS * (kill + 1) and "step " in text[text.rindex("begins"):].split("\n", 1)[1]

    for file, kills in zip(files, (0, 2), strict=True):
        with open(file, "w") as output:
            job = start(tmp_path, output)
            try:
                for kill in range(kills):
                    wait_until(has_made_steps, 200)
                    os.kill(int({rank: pid for pid, rank, _ in begun()[-RANKS:]}[str(kill)]), signal.SIGKILL)
                assert job.wait(300) == 0, file.read_text()
            finally:
                job.terminate()
                job.wait()
    steps = [int(step) for _, _, step in begun()]
    assert len(steps) == 3 * RANKS and steps == sorted(steps) and steps[-1] > steps[RANKS] > 0, steps
    losses = [re.search("mean loss .*", file.read_text())[0] for file in files]
    assert losses[0] == losses[1]
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in files}
