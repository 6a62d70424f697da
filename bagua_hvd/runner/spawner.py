"""Starts processes of a job on this host, and on others over ssh, through one interface.

A spawner belongs to the thread that runs the supervisor's loop.
"""
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from bagua_hvd.job.reporting import PIPE
from bagua_hvd.runner.common.util.hosts import is_local
from bagua_hvd.runner.output import Sink
from bagua_hvd.runner.processes import MARK, Guard, Process, kill_sessions, members, signal_sessions


@dataclass
class Task:
    """A command, and the sinks of its output.

    Attributes:
        name: for messages; the rank.
        env: the whole environment; None: this process's. On another host, in addition to that host's own.
        host: the host's name; None: this one.
    """

    name: Any
    command: list[str]
    env: Mapping[str, str] | None
    stdout: Sink
    stderr: Sink
    host: str | None = None


class AnyProcess(Protocol):
    """The members of processes.Process that the supervisor's loop uses."""

    name: Any
    stdout: int
    stderr: int
    note: str | None

    @property
    def place(self) -> str: ...

    def open_pidfd(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def signal(self, signum: int) -> None: ...

    def release(self) -> None: ...


class Spawner:
    """Starts each process on the host that its task names. A context manager; none may run any more at its exit (see
    kill_all).

    Args:
        remote: the SshSpawner of all other hosts, with methods like those here, and entered with this one; None: there
            are none.
    """

    def __init__(self, remote: Any = None) -> None:
        self._remote = remote
        self._sessions: set[int] = set()
        self._mark = secrets.token_hex(16)
        self._guard: Guard          # set within the context

    def __enter__(self):
        self._guard = Guard(self._mark)
        return self

    def __exit__(self, *exception):
        try:
            if self._remote:
                self._remote.close()
        finally:
            self._guard.close()

    def start(self, task: Task) -> AnyProcess:
        """Starts a task and returns its process. OSError: no more processes or descriptors."""
        if self._remote and not (task.host is None or is_local(task.host)):
            return self._remote.start(task)
        env = {**(os.environ if task.env is None else task.env), MARK: self._mark}
        process = Process(task.name, task.command, env, pipe_variable=PIPE if env.get(PIPE) == "" else None)
        self._sessions.add(process.pid)
        self._guard.watch(process.pid)
        return process

    def signal_all(self, signum: int) -> None:
        """Sends the signal to every process and its descendants. SIGKILL leaves none behind."""
        signal_sessions(self._sessions, signum, self._mark)
        if self._remote:
            self._remote.signal_all(signum)

    def any_left(self) -> bool:
        """Whether a process runs on any host, or here one of its background processes, including daemons."""
        return bool(members(self._sessions, self._mark)) or bool(self._remote and self._remote.any_left())

    def kill_all(self) -> None:
        """Sends SIGKILL to everything that runs; returns when nothing runs on this host any more."""
        kill_sessions(self._sessions, self._mark)
        if self._remote:
            self._remote.kill_all()
