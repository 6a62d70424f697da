"""Workers that a thread starts one by one on this host."""
import io
import os
import shlex
import signal
import threading

import pytest

from bagua_hvd.runner.output import Console, LineForwarder, TextStream
from bagua_hvd.runner.workers import JobStopped, Workers
from launcher import runs, wait_until


class Job:
    """Workers with an in-memory console."""

    def __init__(self):
        self.stdout, self.stderr = io.StringIO(), io.StringIO()
        self.console = Console(TextStream(self.stdout), TextStream(self.stderr))
        self.workers = Workers(self.console)

    def start(self, name, script):
        """Starts a Worker that runs a shell script."""
        output = [LineForwarder(self.console, name, stream) for stream in ("stdout", "stderr")]
        return self.workers.start(None, dict(os.environ), ["sh", "-c", script], output, name)


@pytest.fixture
def job():
    return Job()


def test_exit_codes_and_output(job):
    def main():
        workers = [job.start(0, "echo zero"), job.start(1, "echo one >&2; exit 3"), job.start(2, "kill -TERM $$")]
        return [worker.wait() for worker in workers], workers[1].exit_code

    assert job.workers.run(main)[0] == ([0, 3, 128 + signal.SIGTERM], 3)
    assert job.stdout.getvalue() == "[0]<stdout>:zero\n"
    assert job.stderr.getvalue() == "[1]<stderr>:one\n"


def test_output_is_there_when_wait_returns(job):
    def main():
        job.start(0, "echo first").wait()
        text = job.stdout.getvalue()
        job.start(1, "echo second").wait()
        return text

    assert job.workers.run(main)[0] == "[0]<stdout>:first\n"
    assert job.stdout.getvalue() == "[0]<stdout>:first\n[1]<stdout>:second\n"


def test_one_is_terminated_and_the_others_go_on(job):
    def main():
        lasting, other = job.start(0, "sleep 60"), job.start(1, "sleep 0.5; exit 7")
        assert lasting.wait(0.1) is None and lasting.exit_code is None
        lasting.terminate()
        return lasting.wait(), other.wait()

    assert job.workers.run(main)[0] == (128 + signal.SIGTERM, 7)


def test_one_that_ignores_sigterm_is_killed(job):
    def main():
        worker = job.start(0, "trap '' TERM; echo ready; while :; do sleep 1; done")
        while "ready" not in job.stdout.getvalue():
            assert worker.wait(0.05) is None
        worker.terminate(grace_seconds=0.2)
        return worker.wait()

    assert job.workers.run(main)[0] == 128 + signal.SIGKILL


@pytest.mark.parametrize("script, terminated, code", [
    ("(trap '' TERM; echo $BASHPID; exec sleep 60) & wait", True, 128 + signal.SIGTERM),
    ("sleep 60 & echo $!; kill -KILL $$", False, 128 + signal.SIGKILL)])
def test_what_a_dead_worker_has_started_dies_while_the_job_goes_on(job, script, terminated, code):
    def main():
        job.start(0, "sleep 60")
        worker = job.start(1, f"exec bash -c {shlex.quote(script)}")
        child = int(wait_until(lambda: job.stdout.getvalue().rpartition(":")[2]))
        if terminated:
            worker.terminate(grace_seconds=0.5)
        exit_code = worker.wait()
        wait_until(lambda: not runs(child), 20)
        return exit_code

    assert job.workers.run(main)[0] == code


def test_what_has_ended_is_not_looked_at_again(job):
    """Elastic jobs restart workers for weeks. What one of them has left behind is terminated all the same."""
    def main():
        workers = [job.start(number, "sleep 60 & echo $!") for number in range(4)]
        assert [worker.wait() for worker in workers] == [0] * 4
        supervisor = job.workers._supervisor
        wait_until(lambda: job.workers.call(lambda: not supervisor._running).result())
        assert not job.workers._unfinished
        child = int(job.stdout.getvalue().split()[0].rpartition(":")[2])
        number = int(job.stdout.getvalue()[1])
        workers[number].terminate(grace_seconds=0.5)
        wait_until(lambda: not runs(child), 20)
        wait_until(lambda: job.workers.call(lambda: not supervisor._running).result())

    job.workers.run(main)


def test_what_still_runs_when_main_returns_is_stopped(job):
    workers = []
    result, outcome = job.workers.run(lambda: workers.append(job.start(0, "sleep 60")) or workers[0].wait(0.3))
    assert result is None and outcome.stopped
    assert workers[0].exit_code == 128 + signal.SIGTERM
    with pytest.raises(JobStopped):
        job.start(1, "true")


def test_an_exception_of_main_is_raised(job):
    def main():
        job.start(0, "sleep 60")
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        job.workers.run(main)


def test_a_signal_ends_the_workers(job):
    def main():
        worker = job.start(0, "sleep 60")
        assert worker.wait(0.3) is None
        os.kill(os.getpid(), signal.SIGTERM)
        return worker.wait()

    previous = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        code, outcome = job.workers.run(main)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert code == 128 + signal.SIGTERM and outcome.signum == signal.SIGTERM


def test_no_thread_is_left(job):
    job.workers.run(lambda: job.start(0, "true").wait())
    assert "elastic driver" not in [thread.name for thread in threading.enumerate()]
