"""A rank killed during training: survivors raise and name it, the launcher ends the job."""
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bagua_hvd.torch as hvd

ROOT = Path(__file__).resolve().parents[2]
VICTIM = 1


def train_until_a_rank_dies(algorithm):
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(),
                                         algorithm=algorithm)
    # The end of its process is detected, long before the timeout of half a minute.
    lost = f"rank {VICTIM} was lost: its process ended"
    try:
        for step in range(100_000):
            if hvd.rank() == VICTIM and step == 50:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
    except hvd.HorovodInternalError as error:
        assert lost in str(error), error
        assert (error.rank, error.cause) == (VICTIM, "ended")
        # Later operations raise the same error.
        with pytest.raises(hvd.HorovodInternalError, match=lost) as later:
            hvd.allreduce(torch.ones(1))
        assert (later.value.rank, later.value.cause) == (VICTIM, "ended")
        print("raised")
        return
    raise AssertionError("no error")


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_survivors_name_the_lost_rank(run_ranks, algorithm, transport):
    results = run_ranks(3, train_until_a_rank_dies, arguments={"algorithm": algorithm},
                        env={"BAGUA_HVD_TRANSPORT": transport}, check=False)
    for rank, result in enumerate(results):
        if rank == VICTIM:
            assert result.returncode == -signal.SIGKILL, result.output
        else:
            assert result.returncode == 0 and "raised" in result.output, f"rank {rank}: {result.output}"


def test_the_launcher_ends_the_job():
    command = [sys.executable, "-m", "bagua_hvd.runner.launch", "-np", "3", sys.executable, "-c",
               f"import sys; sys.path.insert(0, {str(ROOT / 'tests' / 'torch')!r}); import test_lost_rank as t; "
               "t.train_until_a_rank_dies('gradient_allreduce')"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert f"Process {VICTIM} exit with status code {128 + signal.SIGKILL}." in done.stdout + done.stderr
