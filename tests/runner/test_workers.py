"""Processes that a thread starts one by one on this host, beside the supervisor's loop, as an elastic driver does."""
import io
import os
import queue
import shlex
import signal
import threading

import pytest

from bagua_hvd.runner.elastic.run import run_beside
from bagua_hvd.runner.output import Console, LineForwarder, TextStream
from bagua_hvd.runner.supervisor import Supervisor, Task
from launcher import runs, wait_until


class Job:
    """A supervisor with an in-memory console."""

    def __init__(self):
        self.stdout, self.stderr = io.StringIO(), io.StringIO()
        self.console = Console(TextStream(self.stdout), TextStream(self.stderr))
        self.supervisor = Supervisor(self.console, on_exit=self._exited)
        self._ended = {}        # name -> queue of the exit code

    def _exited(self, process, exit_code):
        if exit_code and not self.supervisor.stopping:
            self.supervisor.terminate(process)
        self._ended[process.name].put(exit_code)

    def start(self, name, script):
        """Starts a shell script and returns its process."""
        output = [LineForwarder(self.console, name, stream) for stream in ("stdout", "stderr")]
        self._ended[name] = queue.Queue()
        task = Task(name, ["sh", "-c", script], dict(os.environ), *output)
        return self.supervisor.call(lambda: self.supervisor.start(task)).result()

    def wait(self, name, timeout=None):
        """The exit code."""
        return self._ended[name].get(timeout=timeout)

    def terminate(self, process, **grace):
        self.supervisor.call_soon(lambda: self.supervisor.terminate(process, **grace))

    def run(self, main):
        """The result of main(), and the Outcome."""
        results = []
        outcome = run_beside(self.supervisor, lambda: results.append(main()))
        return results[0], outcome


@pytest.fixture
def job():
    return Job()


def test_exit_codes_and_output(job):
    def main():
        for name, script in enumerate(("echo zero", "echo one >&2; exit 3", "kill -TERM $$")):
            job.start(name, script)
        return [job.wait(name) for name in range(3)]

    assert job.run(main)[0] == [0, 3, 128 + signal.SIGTERM]
    assert job.stdout.getvalue() == "[0]<stdout>:zero\n"
    assert job.stderr.getvalue() == "[1]<stderr>:one\n"


def test_output_is_there_when_the_end_is_reported(job):
    def main():
        job.start(0, "echo first")
        job.wait(0)
        return job.stdout.getvalue()

    assert job.run(main)[0] == "[0]<stdout>:first\n"


def test_one_is_terminated_and_the_others_go_on(job):
    def main():
        lasting = job.start(0, "sleep 60")
        job.start(1, "sleep 0.5; exit 7")
        job.terminate(lasting)
        return job.wait(0), job.wait(1)

    assert job.run(main)[0] == (128 + signal.SIGTERM, 7)


def test_one_that_ignores_sigterm_is_killed(job):
    def main():
        process = job.start(0, "trap '' TERM; echo ready; while :; do sleep 1; done")
        wait_until(lambda: "ready" in job.stdout.getvalue())
        job.terminate(process, grace_seconds=0.2)
        return job.wait(0)

    assert job.run(main)[0] == 128 + signal.SIGKILL


@pytest.mark.parametrize("script, terminated, code", [
    ("(trap '' TERM; echo $BASHPID; exec sleep 60) & wait", True, 128 + signal.SIGTERM),
    ("sleep 60 & echo $!; kill -KILL $$", False, 128 + signal.SIGKILL)])
def test_what_a_dead_worker_has_started_dies_while_the_job_goes_on(job, script, terminated, code):
    def main():
        job.start(0, "sleep 60")
        process = job.start(1, f"exec bash -c {shlex.quote(script)}")
        child = int(wait_until(lambda: job.stdout.getvalue().rpartition(":")[2]))
        if terminated:
            job.terminate(process, grace_seconds=0.5)
        exit_code = job.wait(1)
        wait_until(lambda: not runs(child), 20)
        return exit_code

    assert job.run(main)[0] == code


def test_what_has_ended_is_not_looked_at_again(job):
    """Elastic jobs restart workers for weeks. What one of them has left behind is terminated all the same."""
    def main():
        processes = [job.start(number, "sleep 60 & echo $!") for number in range(4)]
        assert [job.wait(number) for number in range(4)] == [0] * 4
        supervisor = job.supervisor
        wait_until(lambda: supervisor.call(lambda: not supervisor._running).result())
        child = int(job.stdout.getvalue().split()[0].rpartition(":")[2])
        number = int(job.stdout.getvalue()[1])
        job.terminate(processes[number], grace_seconds=0.5)
        wait_until(lambda: not runs(child), 20)
        wait_until(lambda: supervisor.call(lambda: not supervisor._running).result())

    job.run(main)


def test_what_still_runs_when_main_returns_is_stopped(job):
    job.run(lambda: job.start(0, "sleep 60"))
    assert job.wait(0) == 128 + signal.SIGTERM


def test_an_exception_of_main_is_raised(job):
    def main():
        job.start(0, "sleep 60")
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        job.run(main)


def test_a_signal_ends_the_workers(job):
    def main():
        job.start(0, "sleep 60")
        os.kill(os.getpid(), signal.SIGTERM)
        return job.wait(0)

    previous = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        code, outcome = job.run(main)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert code == 128 + signal.SIGTERM and outcome.signum == signal.SIGTERM
    assert "elastic driver" not in [thread.name for thread in threading.enumerate()]
