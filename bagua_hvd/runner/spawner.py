"""Starts processes of a job on this host, and on others over ssh, through one interface.

A spawner belongs to the thread that runs the supervisor's loop. Its processes have the members of processes.Process
that the loop uses: name, stdout, stderr, exit_code, note, open_pidfd(), poll(), signal(), release().
"""
import os
import secrets
from contextlib import ExitStack

from bagua_hvd.job.reporting import PIPE
from bagua_hvd.runner.job import is_local
from bagua_hvd.runner.processes import MARK, Guard, Process, kill_sessions, members, signal_sessions


class LocalSpawner:
    """Starts processes on this host. A context manager; none may run any more at its exit (see kill_all)."""

    def __init__(self):
        self._sessions: set[int] = set()
        self._mark = secrets.token_hex(16)
        self._guard: Guard          # set within the context

    def __enter__(self):
        self._guard = Guard(self._mark)
        return self

    def __exit__(self, *exception):
        self._guard.close()

    def start(self, task):
        """Starts a supervisor.Task and returns its Process. OSError: no more processes or descriptors."""
        env = {**(os.environ if task.env is None else task.env), MARK: self._mark}
        process = Process(task.name, task.command, env, pipe_variable=PIPE if env.get(PIPE) == "" else None)
        self._sessions.add(process.pid)
        self._guard.watch(process.pid)
        return process

    def signal_all(self, signum):
        """Sends the signal to every process and its descendants."""
        signal_sessions(self._sessions, signum, self._mark)

    def any_left(self):
        """Whether a process runs, or one of its background processes, including daemons."""
        return bool(members(self._sessions, self._mark))

    def kill_all(self):
        """Sends SIGKILL to everything that runs; returns when nothing runs any more."""
        kill_sessions(self._sessions, self._mark)


class Spawner:
    """Starts each process on the host named by its task, by ssh unless it is this host.

    Args:
        remote: the spawner for all other hosts.
    """

    def __init__(self, remote):
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
        """Starts a supervisor.Task and returns its process. OSError: no more processes or descriptors."""
        local = task.host is None or is_local(task.host)
        return (self._local if local else self._remote).start(task)

    def signal_all(self, signum):
        """Sends the signal to every process and its descendants. SIGKILL leaves none behind."""
        for spawner in self._all:
            spawner.signal_all(signum)

    def any_left(self):
        """Whether a process of the job runs on any host."""
        return any(spawner.any_left() for spawner in self._all)

    def kill_all(self):
        """Sends SIGKILL to everything that runs; returns when nothing runs on this host any more."""
        for spawner in self._all:
            spawner.kill_all()
