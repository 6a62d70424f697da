"""A rank fails: which rank baguarun blames, what the others may still do, and the last line of the output."""
import io
import re
import signal
import sys
import time
from pathlib import Path

import pytest

import bagua_hvd
from bagua_hvd.runner import reports
from bagua_hvd.runner.output import Console, TextStream
from bagua_hvd.runner.ssh.connection import RemoteProcess
from bagua_hvd.runner.supervisor import Supervisor, Task
from launcher import wait_until

WORKER = Path(__file__).with_name("summing_worker.py")
LAST = re.compile(r"The first process to do so was: Process name: (\d+), Exit code: (\d+)")

pytestmark = pytest.mark.timeout(120)


def fail(launcher, rank, action, *flags, np=3, **options):
    """(exit code, stdout, stderr, seconds) of a job in which this rank performs the action."""
    began = time.monotonic()
    popen = launcher.start("-np", np, *flags, sys.executable, WORKER, rank, action, **options)
    stdout, stderr = (text.decode() for text in popen.communicate(timeout=100))
    assert launcher.processes() == []
    assert "bagua_hvd report" not in stdout + stderr
    return popen.returncode, stdout, stderr, time.monotonic() - began


def blamed(stderr):
    return tuple(map(int, LAST.search(stderr).groups()))


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("action, code", [("sys.exit", 7), ("os._exit", 7), ("raise", 1), ("kill", 137)])
def test_the_one_that_failed_first_is_named(launcher, rank, action, code):
    exit_code, _, stderr, _ = fail(launcher, rank, action)
    assert blamed(stderr) == (rank, code) and exit_code == code, stderr
    # The others ended on their own, each with its own error.
    assert "Terminating" not in stderr
    for other in {0, 1, 2} - {rank}:
        assert re.search(rf"\[{other}\]<stderr>:.*HorovodInternalError: .*rank {rank} ", stderr), stderr


def test_the_output_of_the_last_processes_is_kept(monkeypatch):
    """Elastic jobs restart workers for weeks."""
    monkeypatch.setattr(reports, "_ALL_TAILS_NBYTES", 150)
    kept, failure = reports.Reports(), b"Traceback (most recent call last):\nLookupError: mine\n"
    for process in 1, 2:
        kept.record_stderr(process, failure)
    assert kept._buried_traceback(1) == b""             # the other one's is the same
    kept.record_stderr(1, b"other words\n")
    assert kept._buried_traceback(2) == failure
    kept.record_stderr(3, bytes(50))
    assert kept._buried_traceback(2) == b"" and list(kept._stderr_tail) == [1, 3]


class _NoSink:
    def feed(self, data):
        raise AssertionError(data)

    def close(self):
        pass


class _TwoOnAnotherHost:
    """A spawner of two processes: while the first one's end is handled, the host reports the second one's."""

    def __init__(self):
        self.processes = []

    def start(self, task):
        process = RemoteProcess(None, len(self.processes), task.name)
        process.close()
        self.processes.append(process)
        if len(self.processes) == 2:
            self.processes[0].end(1)
        return process

    def on_end(self, name, code):
        self.processes[1].end(7)

    def signal_all(self, signum):
        pass

    def any_left(self):
        return False

    kill_all = any_left


def test_an_end_that_a_host_tells_of_while_another_is_handled():
    spawner = _TwoOnAnotherHost()
    console = Console(TextStream(io.StringIO()), TextStream(io.StringIO()))
    supervisor = Supervisor(console, spawner=spawner, on_end=spawner.on_end, handle_signals=False,
                            survivors_seconds=5, find_cause=lambda failures: failures[-1])
    outcome = supervisor.run([Task(rank, [], {}, _NoSink(), _NoSink()) for rank in range(2)])
    assert (outcome.exit_codes, outcome.failures, outcome.failed) == ({0: 1, 1: 7}, [0, 1], 1)


def test_its_traceback_comes_last(launcher):
    stderr = fail(launcher, 1, "raise twice")[2]
    before, _, repeated = stderr.partition("baguarun: Process 1 failed first. It had written:")
    assert "[1]<stderr>:LookupError: mine alone" in before and "HorovodInternalError" in before
    lines = [line for line in repeated.splitlines() if "<stderr>:" in line]
    assert all(line.startswith("[1]<stderr>:") for line in lines)
    assert lines[0] == "[1]<stderr>:Traceback (most recent call last):"
    assert "[1]<stderr>:LookupError: mine alone" in lines
    assert lines[-1] == "[1]<stderr>:OSError: the second"


def test_no_traceback_is_repeated_that_is_the_last_anyway(launcher):
    stderr = fail(launcher, 0, "raise", np=1)[2]
    assert stderr.count("LookupError: mine alone") == 1


def test_names_of_one_machine_as_hosts(launcher):
    exit_code, _, stderr, _ = fail(launcher, 1, "sys.exit", "-H", "localhost:1,127.0.0.1:1,127.0.0.2:1")
    assert (exit_code, blamed(stderr)) == (7, (1, 7)), stderr


def test_hosts_over_ssh(launcher, ssh_hosts):
    exit_code, _, stderr, _ = fail(launcher, 1, "sys.exit", "-H", "far1:1,far2:2", env=ssh_hosts.environment)
    assert (exit_code, blamed(stderr)) == (7, (1, 7)), stderr


def test_a_script_that_redirects_its_stderr_keeps_it(launcher):
    popen = launcher.start("-np", 2, "sh", "-c", f"{sys.executable} {WORKER} 1 sys.exit 2>errors.$HOROVOD_RANK")
    popen.communicate(timeout=100)
    assert popen.returncode in (1, 7)
    text = (launcher.folder / "errors.0").read_text()
    assert "rank 1 left the job" in text and "\0" not in text and "report" not in text


# ---- the grace period -------------------------------------------------------------------------------------------

def test_survivors_save_before_they_end(launcher):
    exit_code, stdout, stderr, _ = fail(launcher, 1, "kill", env={"TEST_SAVE": "2"})
    assert exit_code == 137 and blamed(stderr) == (1, 137)
    # The killed rank had its twentieth sum; the connection may have broken before another rank had it.
    saved = {rank: int(steps) for rank, steps in re.findall(r"\[(\d)\]<stdout>:saved (\d+)", stdout)}
    assert set(saved) == {"0", "2"} and set(saved.values()) <= {19, 20}, stdout
    assert "the remaining workers have 5 s to end by themselves" in stderr and "Terminating" not in stderr


@pytest.mark.parametrize("flags, env", [(["--grace-seconds", "1"], {}), ([], {"BAGUA_HVD_GRACE_SECONDS": "1"})])
def test_the_grace_ends(launcher, flags, env):
    exit_code, stdout, stderr, seconds = fail(launcher, 1, "kill", *flags, env={"TEST_SAVE": "60", **env})
    assert exit_code == 137 and stdout == "" and 1 < seconds < 60
    assert "Terminating remaining workers after failure of Process 1.\n" in stderr


def test_no_grace(launcher):
    done = launcher.run("-np", 2, "--grace-seconds", 0, "sh", "-c",
                        'if [ $HOROVOD_RANK = 1 ]; then exit 3; else sleep 4; echo late; fi')
    assert done.returncode == 3 and "late" not in done.stdout and "have 0" not in done.stderr


def test_a_signal_shortens_the_grace(launcher):
    popen = launcher.start("-np", 2, "--grace-seconds", 600, "sh", "-c",
                           'if [ $HOROVOD_RANK = 1 ]; then exit 3; else sleep 600; fi')
    line = b""
    while b"have 600 s" not in line:
        line = popen.stderr.readline()
        assert line
    popen.send_signal(signal.SIGINT)
    stderr = popen.communicate(timeout=60)[1].decode()
    assert popen.returncode == 3 and blamed(stderr) == (1, 3)


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_a_grace_that_is_none(launcher, text):
    done = launcher.run("-np", 1, "true", env={"BAGUA_HVD_GRACE_SECONDS": text})
    assert done.returncode == 2 and f"BAGUA_HVD_GRACE_SECONDS='{text}': expected a time in seconds" in done.stderr


# ---- before init() ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("code, early", [(0, 0), (5, 0), (0, 1)])
def test_those_that_wait_in_init_hear_of_one_that_ended(launcher, code, early):
    """This includes ranks that call init() later."""
    script = ("import os, sys, time\n"
              f"if os.environ['HOROVOD_RANK'] == '1': time.sleep({1 - early}); sys.exit({code})\n"
              f"time.sleep({early})\n"
              "from bagua_hvd.job import basics\nbasics.init()")
    began = time.monotonic()
    popen = launcher.start("-np", 3, sys.executable, "-c", script, env={"HOROVOD_START_TIMEOUT": "100"})
    stderr = popen.communicate(timeout=90)[1].decode()
    assert popen.returncode == (code or 1) and time.monotonic() - began < 60
    sentence = (f"Horovod initialization failed. rank 1 of 3 has ended, with exit code {code}, and did not "
                "call init() (scope init.1)")
    for rank in (0, 2):
        assert re.search(rf"^\[{rank}\]<stderr>:\S+: {re.escape(sentence)}$", stderr, re.MULTILINE), stderr
    assert blamed(stderr)[1] == (code or 1)


def test_one_that_needs_no_init_disturbs_nobody(launcher):
    script = "import os, sys\nif os.environ['HOROVOD_RANK'] == '1': sys.exit(0)\nprint('done')"
    done = launcher.run("-np", 2, sys.executable, "-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0]<stdout>:done\n", "")


# ---- bagua_hvd.run ----------------------------------------------------------------------------------------------

def test_of_a_function(capfd):
    def function():
        import os

        import numpy as np

        from bagua_hvd.core import native, vectors
        from bagua_hvd.job import basics

        basics.init()
        if basics.rank() == 1:
            os._exit(7)
        values = np.ones(3, np.float32)
        basics.context().post(native.ALLREDUCE, "sum", [vectors.array_view(values)], blocking=True).wait()

    with pytest.raises(RuntimeError, match="Horovod detected that one or more processes exited with non-zero status.*"
                                           "Process name: 1, Exit code: 7"):
        bagua_hvd.run(function, num_proc=3)


OTHERS = """
import os, signal, sys
import numpy as np
from bagua_hvd.core import native, vectors
from bagua_hvd.job import basics
action = sys.argv[1]
mine = os.environ["HOROVOD_RANK"] == "1"
if mine and action == "skips init":
    sys.exit(0)
basics.init()
if mine and action == "leaves early":
    sys.exit(0)
if mine:
    os.kill(os.getpid(), signal.SIGSTOP)
values = np.ones(3, np.float32)
basics.context().post(native.ALLREDUCE, "sum", [vectors.array_view(values)], op=native.OP_SUM, blocking=True).wait()
"""


@pytest.mark.parametrize("action, last", [
    ("skips init", "Exit code: 1. Before that, rank 1 had ended with exit code 0"),
    ("leaves early", "Exit code: 1. It needed rank 1, which ended with exit code 0"),
    ("is stopped", "Exit code: 1. It waited for rank 1, which did not respond")])
def test_the_last_line_names_a_rank_that_did_not_fail(launcher, action, last):
    popen = launcher.start("-np", 2, sys.executable, "-c", OTHERS, action,
                           env={"BAGUA_HVD_HEARTBEAT_TIMEOUT_SECONDS": "4"})
    stderr = popen.communicate(timeout=100)[1].decode()
    assert stderr.splitlines()[-1].endswith(last), stderr
    assert "direct cause" not in stderr


def test_equal_tracebacks_are_not_repeated(launcher):
    code = "from bagua_hvd.job import process_sets; process_sets.context_and_id(None)"
    popen = launcher.start("-np", 2, sys.executable, "-c", code)
    stderr = popen.communicate(timeout=100)[1].decode()
    assert stderr.count("Traceback") == 2 and "had written" not in stderr, stderr


def test_misspelt_names_are_told(launcher):
    code = "from bagua_hvd.job import basics; basics.init()"
    done = launcher.run("-np", 2, sys.executable, "-c", code, env={"BAGUA_ALGORTIHM": "x", "BAGUA_ALGORITHM": "bytegrd",
                                                                  "BAGUA_HVD_HEARTBEAT_TIMEOUT": "3"})
    assert done.returncode == 0
    assert done.stderr.count("BAGUA_ALGORTIHM is unknown and has no effect. Did you mean BAGUA_ALGORITHM?") == 1
    assert "Did you mean BAGUA_HVD_HEARTBEAT_TIMEOUT_SECONDS?" in done.stderr
    assert "baguarun: warning: BAGUA_ALGORITHM=bytegrd: unknown algorithm 'bytegrd'. Did you mean 'bytegrad'?" \
        in done.stderr
    with pytest.raises(AttributeError, match="import bagua_hvd.torch as hvd"):
        bagua_hvd.init()


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
print("begun", flush=True)
time.sleep(float(os.environ.get("TEST_SLEEP", "0")))
"""


def test_daemons_end_with_the_job(launcher):
    assert launcher.run("-np", 2, sys.executable, "-c", DAEMON).returncode == 0     # it checks for remaining processes


def test_daemons_end_with_a_launcher_that_is_killed(launcher):
    popen = launcher.start("-np", 2, sys.executable, "-c", DAEMON, env={"TEST_SLEEP": "600"})
    for _ in range(2):
        assert popen.stdout.readline().endswith(b"begun\n")
    popen.kill()
    wait_until(lambda: not launcher.processes())


def test_a_daemon_without_the_jobs_variable_lives_on(launcher):
    popen = launcher.start("-np", 1, "env", "-u", "BAGUA_HVD_JOB", sys.executable, "-c", DAEMON)
    assert popen.wait(60) == 0
    assert len(launcher.processes()) == 1
    launcher.close()
