"""bagua_hvd.run with min_num_proc: an elastic job with a function as worker, on this host and on others."""
import os
import signal
import tempfile

import pytest

import bagua_hvd
from bagua_hvd.runner.job import WorkerFailed


def test_a_launcher_of_this_host_is_reached_from_it_only():
    def listens_at(pid=None):
        import psutil

        return {tuple(each.laddr) for each in psutil.Process(pid or os.getppid()).net_connections()
                if each.status == psutil.CONN_LISTEN}

    before = listens_at(os.getpid())        # what earlier tests left open in this process
    (during,) = bagua_hvd.run(listens_at, num_proc=1, min_num_proc=1, hosts="localhost:1,127.0.0.2:1")
    assert {host for host, _ in during - before} == {"127.0.0.1"}


@pytest.fixture
def far(ssh_hosts, monkeypatch, tmp_path):
    """The hosts far1, far2, ... exist; none of their folders may be left behind."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    for name, value in {**ssh_hosts.environment, "TMPDIR": str(folder)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.chdir(tmp_path)
    yield
    assert list(folder.iterdir()) == []


def work(folder):
    """Rank 0 is killed in the first generation; the survivors return their rank and size."""
    from pathlib import Path

    from bagua_hvd.core import objects
    from bagua_hvd.job import basics, elastic

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
    return *result, os.environ["HOROVOD_HOSTNAME"]


def test_results_are_those_of_the_last_ranks(tmp_path):
    results = bagua_hvd.run(work, (str(tmp_path),), num_proc=3, min_num_proc=1, hosts="localhost:1,127.0.0.2:2")
    assert results == [(0, 2, 10, "127.0.0.2")]         # of min_num_proc ranks
    assert {path.name for path in tmp_path.iterdir()} == {"done.0", "done.1"}


def test_output_files_are_of_one_job(launcher):
    for word in ("first", "second"):
        done = launcher.run("-np", 2, "--min-np", 1, "-H", "localhost:1,127.0.0.2:1", "--output-filename", "logs", "sh",
                            "-c", f"echo {word}")
        assert done.returncode == 0
    assert (launcher.folder / "logs/rank.0/stdout").read_text() == "second\n"


def test_on_hosts_over_ssh(far, tmp_path):
    """The two survivors become ranks 0 and 1, on hosts that had other ranks."""
    done = tmp_path / "done"
    done.mkdir()
    results = bagua_hvd.run(work, (str(done),), num_proc=3, min_num_proc=2, hosts="far1:1,localhost:1,far2:1")
    assert results == [(0, 2, 10, "localhost"), (1, 2, 10, "far2")]


def fail():
    raise KeyError("mine")


def test_a_failure_of_all_is_explained(capfd):
    with pytest.raises(RuntimeError) as ended:
        bagua_hvd.run(fail, min_num_proc=2, hosts="localhost:1,127.0.0.2:1")
    # The job ends with the first of two hosts that cannot return; the other worker may have failed by then.
    failed = ended.value if isinstance(ended.value, WorkerFailed) else ended.value.__cause__
    assert isinstance(failed, WorkerFailed) and "KeyError: 'mine'" in str(failed) + capfd.readouterr().err


def fail_on_far1_first(folder):
    """far2 starts when far1 has failed."""
    import time
    from pathlib import Path

    from bagua_hvd.job import basics

    if os.environ["HOROVOD_HOSTNAME"] == "far1":
        Path(folder, "first").touch()
        raise KeyError("first")
    while not Path(folder, "first").exists():
        time.sleep(0.01)
    basics.init()
    raise KeyError("second")


def test_a_failure_over_ssh_has_the_traceback_of_the_worker(far, tmp_path):
    """This includes a failure that the job would have survived with another host."""
    with pytest.raises(RuntimeError, match="Timed out waiting for minimum number of slots") as caught:
        bagua_hvd.run(fail_on_far1_first, (str(tmp_path),), min_num_proc=2, hosts="far1:1,far2:1", num_proc=2)
    cause = caught.value.__cause__
    assert isinstance(cause, WorkerFailed) and cause.rank == 0
    assert "in fail_on_far1_first" in str(cause) and "KeyError: 'first'" in str(cause)


def test_a_failure_that_was_survived_explains_no_later_one(far, tmp_path):
    with pytest.raises(WorkerFailed, match="(?s)Process name: 0, .*KeyError: 'second'"):
        bagua_hvd.run(fail_on_far1_first, (str(tmp_path),), min_num_proc=1, hosts="far1:1,far2:1", num_proc=2)
