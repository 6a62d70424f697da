"""bagua_hvd.run with min_num_proc: an elastic job whose workers are a function."""
import os
import signal

import pytest

import bagua_hvd
from bagua_hvd.runner.job import WorkerFailed


def work(folder):
    """Rank 0 is killed when all have met for the first time; what is left returns its rank and size."""
    from pathlib import Path

    from bagua_hvd.common import basics, elastic, objects

    basics.init()
    state = elastic.ObjectState(
        lambda value: objects.broadcast_object(basics.context(), value, 0, basics.rank() == 0, "state"), basics.rank,
        step=0)

    def train(state):
        while state.step < 10:
            objects.allgather_object(basics.context(), state.step, "step")
            state.step += 1
            state.commit()
            if state.step == 5 and basics.size() == 3 and basics.rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return basics.rank(), basics.size(), state.step

    result = elastic.run_fn(train, elastic.reset)(state)
    Path(folder, f"done.{basics.rank()}").touch()
    return result


def test_results_are_those_of_the_last_ranks(tmp_path):
    results = bagua_hvd.run(work, (str(tmp_path),), num_proc=3, min_num_proc=1, hosts="localhost:1,127.0.0.2:2")
    assert results == [(0, 2, 10)]      # of min_num_proc ranks
    assert {path.name for path in tmp_path.iterdir()} == {"done.0", "done.1"}


def fail():
    raise KeyError("mine")


def test_a_failure_of_all_is_explained(capfd):
    with pytest.raises(WorkerFailed, match="KeyError: 'mine'"):
        bagua_hvd.run(fail, min_num_proc=2, hosts="localhost:1,127.0.0.2:1")
