"""Runs baguarun as users do, and makes sure that no test leaves a process behind."""
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).parents[2]
BAGUARUN = [sys.executable, "-m", "bagua_hvd.runner.launch"]
# In the environment of every process of a job, which is how they are found.
MARK = "BAGUA_HVD_TEST_JOB"


def processes_of(mark):
    """The pids of running processes with the mark in their environment. Zombies have no environment."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
            except OSError:
                pass
    return found


def runs(pid):
    """Whether this process exists, and is no zombie."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())      # a zombie has none
    except OSError:
        return False


def wait_until(condition, seconds=60):
    """Waits until the condition is true, and returns its result. AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.02)
    return result


class Launcher:
    """Starts baguarun with these arguments; kills its processes when the test ends."""

    def __init__(self, folder):
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self._popens = []

    def start(self, *arguments, env=None, prefix=(), **options):
        """The Popen of a baguarun, in its own session. prefix: put before its command."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), MARK: self.mark, **(env or {})}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": self.folder, **options}
        command = [*prefix, *BAGUARUN, *map(str, arguments)]
        popen = subprocess.Popen(command, env=environment, start_new_session=True, **options)
        self._popens.append(popen)
        return popen

    def run(self, *arguments, timeout=100, **options):
        """Returns the CompletedProcess, with text; checks that no process is left."""
        popen = self.start(*arguments, **options)
        stdout, stderr = popen.communicate(timeout=timeout)
        assert self.processes() == []
        text = [(data or b"").decode(errors="surrogateescape") for data in (stdout, stderr)]
        assert "Traceback" not in text[1], text[1]
        return subprocess.CompletedProcess(popen.args, popen.returncode, *text)

    def processes(self):
        """The running processes of all jobs of this test."""
        return processes_of(self.mark)

    def close(self):
        """Kills all remaining processes, and returns them."""
        left = self.processes()
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        wait_until(lambda: not self.processes())     # a killed process ends when it runs next
        for popen in self._popens:
            popen.wait()
            for file in (popen.stdout, popen.stderr):
                if file:
                    file.close()
        return left
