"""Workers that are stopped, not ended: heartbeats detect them, and they are replaced for good."""
import os
import signal
from pathlib import Path

import pytest

from elastic_job import with_rank
from launcher import runs, wait_until

WORKER = [Path(__file__).with_name("plain_worker.py")]
A, B, C = "localhost", "127.0.0.2", "127.0.0.3"
# Seconds; longer than a busy machine delays a process.
LIMIT = {"BAGUA_HVD_HEARTBEAT_TIMEOUT_SECONDS": "6"}


def stop(event):
    """Stops the process that printed the event, and returns its pid."""
    pid = int(event.words["pid"])
    os.kill(pid, signal.SIGSTOP)
    return pid


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_stopped_worker_is_replaced(make_job, rank):
    job = make_job({A: 1, B: 1})
    job.start("--min-np", 1, "--max-np", 2, command=WORKER, env=LIMIT)
    first = job.wait_for("enter", 2, size=2)
    job.wait_for("committed", 2, step=5)
    committed = job.committed()
    host = (A, B)[rank]
    pid = stop(with_rank(first, rank))
    alone = job.wait_for("enter", size=1)[0]
    job.wait_for_text(f"a worker on {host} did not respond, and was killed: the host is blacklisted")
    assert alone.words["pid"] == with_rank(first, 1 - rank).words["pid"]
    assert int(alone.words["step"]) >= committed
    wait_until(lambda: not runs(pid))
    os.kill(pid, signal.SIGCONT)                # no process is left to continue
    job.set_hosts({A: 1, B: 1, C: 1})
    again = job.wait_for("enter", 4, size=2)[2:]
    assert with_rank(again, 0).words["pid"] == alone.words["pid"]
    assert str(pid) not in {event.words["pid"] for event in again}
    job.wait_for("committed", step=int(again[0].words["step"]) + 3)
    assert job.finish() == 0, job.text
    assert [event.words["size"] for event in job.of("done")] == ["2", "2"] and len(job.of("enter")) == 5


def test_one_is_stopped_while_another_one_is_killed(make_job):
    """Nobody waits long enough to report the stopped one as silent: the others leave because of the killed one."""
    job = make_job({A: 1, B: 1, C: 1})
    job.start("--min-np", 1, "--elastic-timeout", 4, command=WORKER, env=LIMIT)
    first = job.wait_for("enter", 3, size=3)
    job.wait_for("committed", 3, step=5)
    pid = stop(with_rank(first, 2))
    job.kill(with_rank(first, 1))
    job.wait_for_text(f"a worker on {C} has not called init() for 4 s while others waited, and was killed")
    alone = job.wait_for("enter", size=1)[0]
    assert alone.words["pid"] == with_rank(first, 0).words["pid"]
    wait_until(lambda: not runs(pid))           # a killed process may take a moment to end
    assert job.finish() == 0, job.text


def test_two_are_stopped(make_job):
    """The others report only one of them, and have no connection to the other one after they left."""
    job = make_job({A: 1, B: 1, C: 1})
    job.start("--min-np", 1, "--start-timeout", 5, command=WORKER, env=LIMIT)
    first = job.wait_for("enter", 3, size=3)
    job.wait_for("committed", 3, step=5)
    pids = [stop(with_rank(first, rank)) for rank in (1, 2)]
    alone = job.wait_for("enter", size=1)[0]
    assert alone.words["pid"] == with_rank(first, 0).words["pid"]
    wait_until(lambda: not any(map(runs, pids)))
    assert job.finish() == 0, job.text


def test_one_that_is_continued_in_time_stays(make_job):
    job = make_job({A: 1, B: 1})
    job.start("--min-np", 1, command=WORKER, env={"BAGUA_HVD_HEARTBEAT_TIMEOUT_SECONDS": "60"})
    first = job.wait_for("enter", 2, size=2)
    job.wait_for("committed", 2, step=5)
    pid = stop(with_rank(first, 1))
    committed = job.committed()
    wait_until(lambda: job.committed() <= committed + 2)        # the other waits in the next step
    os.kill(pid, signal.SIGCONT)
    job.wait_for("committed", 2, step=committed + 10)
    assert job.finish() == 0, job.text
    assert len(job.of("enter")) == 2 and "silent" not in job.text


def test_on_a_host_over_ssh(make_job, ssh_hosts):
    job = make_job({A: 1, "far1": 1})
    job.start("--min-np", 1, command=WORKER, env={**LIMIT, **ssh_hosts.environment})
    first = job.wait_for("enter", 2, size=2)
    job.wait_for("committed", 2, step=5)
    pid = stop(with_rank(first, 1))
    job.wait_for("enter", size=1)
    wait_until(lambda: not runs(pid))
    assert job.finish() == 0, job.text
    assert "a worker on far1 did not respond, and was killed: the host is blacklisted" in job.text
