"""One process of a job with its descendants, and the guard.

Every process leads a session of its own. It stays unreaped (a zombie) until release(), so its session's number cannot
be reused meanwhile, and signals to the session reach only our processes. Processes that leave the session (setsid, a
daemon) are recognized by the environment variable MARK, whose value is unique to the job.

The guard is a child in its own session that reads the sessions' numbers from a pipe. If the launcher ends without
notice, for instance by SIGKILL, the pipe closes, and the guard kills all processes that are left, even those that the
death signal of exec_worker.py does not reach: the workers' children. It runs this file without the package.
"""
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

_EXEC = os.path.join(os.path.dirname(os.path.abspath(__file__)), "exec_worker.py")
MARK = "BAGUA_HVD_JOB"
_MARK = b"mark "
_DONE = b"done\n"
_POLL_SECONDS = 0.02
_FOR_THE_LOADER = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


def _is_zombie(pid):
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The state follows the name in parentheses, which may contain anything.
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except (OSError, IndexError):
        return True


def _carries(pid, mark):
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{MARK}={mark}".encode() in file.read().split(b"\0")
    except OSError:
        return False        # ended, or another user's


def members(sessions: Collection[int], mark: str | None = None) -> list[int]:
    """The running processes of these sessions, and those with the mark. Empty on systems without /proc."""
    found: list[int] = []
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return found
    for pid in pids:
        try:
            if (os.getsid(pid) in sessions or (mark and _carries(pid, mark))) and not _is_zombie(pid):
                found.append(pid)
        except OSError:
            pass        # it has ended meanwhile
    return found


def _ignoring_absence(send, pid, signum):
    with suppress(ProcessLookupError, PermissionError):
        send(pid, signum)


def signal_sessions(sessions: Collection[int], signum: int, mark: str | None = None) -> None:
    """Sends the signal to every member, process groups of session leaders first."""
    for session in sessions:
        _ignoring_absence(os.killpg, session, signum)
    for pid in members(sessions, mark):
        # Processes in groups of their own, made by a shell with job control, and daemons.
        if _group(pid) not in sessions:
            _ignoring_absence(os.kill, pid, signum)


def _group(pid):
    try:
        return os.getpgid(pid)
    except OSError:
        return None


def kill_sessions(sessions: Collection[int], mark: str | None = None) -> None:
    """Sends SIGKILL until no member is left: a process forked during one search is found in the next."""
    signal_sessions(sessions, signal.SIGKILL, mark)
    for _ in range(100):
        if not members(sessions, mark):
            return
        time.sleep(_POLL_SECONDS)
        signal_sessions(sessions, signal.SIGKILL, mark)


def _pipe(on_error, theirs):
    """(our end, non-blocking; the process's end). The exit stacks close them."""
    reader, writer = os.pipe()
    on_error.callback(os.close, reader)
    theirs.callback(os.close, writer)
    os.set_blocking(reader, False)
    return reader, writer


class Process:
    """A command that runs as the leader of a new session; its input is /dev/null.

    The kernel kills it when the thread that created it ends: create it in a thread that lives long enough.

    Attributes:
        name: for messages; the rank in a job.
        pid: also the number of its session.
        stdin: with subprocess.PIPE, the raw file that it reads from; the owner closes it.
        stdout, stderr: non-blocking descriptors to read from; the owner closes them.
        exit_code: None while it runs; 128 + n if signal n ended it.
        note: further information about its end; None: there is none.

    Args:
        command: list of arguments, passed on unchanged, without a shell.
        env: the whole environment.
        stdin: a descriptor or subprocess.PIPE.
        pipe_variable: variable that names the pipe of the process's stderr, as "device:inode".
    Raises:
        OSError: no more processes or descriptors.
    """

    note: str | None = None

    def __init__(self, name: Any, command: Sequence[str], env: Mapping[str, str], stdin: int = subprocess.DEVNULL,
                 pipe_variable: str | None = None) -> None:
        self.name = name
        self.exit_code: int | None = None
        with ExitStack() as on_error, ExitStack() as theirs:
            self.stdout, stdout = _pipe(on_error, theirs)
            self.stderr, stderr = _pipe(on_error, theirs)
            if pipe_variable is not None:
                pipe = os.fstat(stderr)
                env = {**env, pipe_variable: f"{pipe.st_dev}:{pipe.st_ino}"}
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", _EXEC, str(os.getpid()), *command], env=env, bufsize=0,
                stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True)
            self.pid = self._popen.pid
            self.stdin: Any = self._popen.stdin
            on_error.pop_all()

    @property
    def place(self) -> str:
        """Its location, for messages."""
        return f"pid {self.pid}"

    def signal(self, signum: int) -> None:
        """Sends the signal to the process and its descendants in its session; SIGUSR1 and SIGUSR2 to the process alone,
        since workers of data loaders may not handle them."""
        if signum in (signal.SIGUSR1, signal.SIGUSR2):
            _ignoring_absence(os.kill, self.pid, signum)
        else:
            signal_sessions({self.pid}, signum)

    def open_pidfd(self) -> int | None:
        """A descriptor that becomes readable when the process ends; None if the system has no pidfds."""
        try:
            return os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            return None

    def poll(self) -> int | None:
        """The exit code; None while it runs. Never blocks or reaps."""
        if self.exit_code is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is not None:
                self.exit_code = ended.si_status + (0 if ended.si_code == os.CLD_EXITED else 128)
        return self.exit_code

    def release(self) -> None:
        """Reaps the process, which has ended. Its number may be reused from now on."""
        self._popen.wait()


class Guard:
    """Outlives the launcher, then kills its sessions and the processes with the mark, unless close() came before."""

    def __init__(self, mark: str | None = None) -> None:
        # Without the job's secret; but many Pythons do not start without the loader's variables.
        env = {name: os.environ[name] for name in _FOR_THE_LOADER if name in os.environ}
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__)], env=env, bufsize=0, cwd="/",
            start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        assert self._popen.stdin is not None        # PIPE
        self._stdin = self._popen.stdin
        if mark is not None:
            self._tell(_MARK + mark.encode() + b"\n")

    def watch(self, session: int) -> None:
        """From now on this session is killed when the launcher ends."""
        self._tell(b"%d\n" % session)

    def _tell(self, line):
        with suppress(BrokenPipeError):     # the guard was killed; the death signal remains
            self._stdin.write(line)

    def close(self) -> None:
        """Tells the guard to do nothing, and waits for its end."""
        self._tell(_DONE)
        self._stdin.close()
        self._popen.wait()


def _guard():
    sessions, mark = set(), None
    for line in sys.stdin.buffer:
        if line == _DONE:
            return
        if line.startswith(_MARK):
            mark = line[len(_MARK):-1].decode()
        else:
            sessions.add(int(line))
    kill_sessions(sessions, mark)


if __name__ == "__main__":
    _guard()
