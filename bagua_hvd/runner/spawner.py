"""Where processes of a job are started: on this host, and on others over ssh. One interface for both.

A spawner belongs to the thread that runs the supervisor's loop. What it starts has the members of processes.Process
that the loop uses: name, stdout, stderr, exit_code, note, open_pidfd(), poll(), signal(), release().
"""
import os
import secrets
from contextlib import ExitStack

from bagua_hvd.job.reporting import PIPE
from bagua_hvd.runner.processes import MARK, Guard, Process, kill_sessions, members, signal_sessions


class LocalSpawner:
    """Starts processes on this host. A context manager; when it is left, none may run any more (see kill_all)."""

    def __init__(self):
        self._sessions: set[int] = set()
        self._mark = secrets.token_hex(16)
        self._guard: Guard          # inside

    def __enter__(self):
        self._guard = Guard(self._mark)
        return self

    def __exit__(self, *exception):
        self._guard.__exit__(*exception)

    def start(self, task):
        """The running Process of a supervisor.Task. OSError: no more processes or descriptors."""
        env = {**(os.environ if task.env is None else task.env), MARK: self._mark}
        process = Process(task.name, task.command, env, pipe_variable=PIPE if env.get(PIPE) == "" else None)
        self._sessions.add(process.pid)
        self._guard.watch(process.pid)
        return process

    def signal_all(self, signum):
        """Sends the signal to every process, with all that it started."""
        signal_sessions(self._sessions, signum, self._mark)

    def any_left(self):
        """Whether a process runs, or something that one left in the background, a daemon too."""
        return bool(members(self._sessions, self._mark))

    def kill_all(self):
        """SIGKILL for everything that runs; returns when nothing does."""
        kill_sessions(self._sessions, self._mark)


class Spawner:
    """Starts each process on the host that its task names, over ssh unless that is this one.

    Args:
        is_local: function of a host's name: whether it is this host.
        remote: the spawner of all others.
    """

    def __init__(self, is_local, remote):
        self._is_local = is_local
        self._local, self._remote = LocalSpawner(), remote
        self._all = self._local, remote

    def __enter__(self):
        with ExitStack() as stack:
            for spawner in self._all:
                stack.enter_context(spawner)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception):
        self._stack.close()

    def start(self, task):
        """The running process of a supervisor.Task. OSError: no more processes or descriptors."""
        local = task.host is None or self._is_local(task.host)
        return (self._local if local else self._remote).start(task)

    def signal_all(self, signum):
        """Sends the signal to every process, with all that it started. SIGKILL leaves none behind."""
        for spawner in self._all:
            spawner.signal_all(signum)

    def any_left(self):
        """Whether something of the job runs anywhere."""
        return any(spawner.any_left() for spawner in self._all)

    def kill_all(self):
        """SIGKILL for everything that runs; returns when nothing does on this host."""
        for spawner in self._all:
            spawner.kill_all()
