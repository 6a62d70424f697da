"""Starts processes of a job on this host, and on others over ssh, through one interface.

A spawner belongs to the thread that runs the supervisor's loop.
"""
import os
import secrets
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from bagua_hvd.job.reporting import PIPE
from bagua_hvd.runner.job import is_local
from bagua_hvd.runner.output import Sink
from bagua_hvd.runner.processes import MARK, Guard, Process, kill_sessions, members, signal_sessions


@dataclass
class Task:
    """A command, and the sinks of its output.

    Attributes:
        name: for messages; the rank.
        env: the whole environment; for another host, the differences from the connection's base environment.
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


class AnySpawner(AbstractContextManager[Any], Protocol):
    """See LocalSpawner."""

    def start(self, task: Task) -> AnyProcess: ...

    def signal_all(self, signum: int) -> None: ...

    def any_left(self) -> bool: ...

    def kill_all(self) -> None: ...


class LocalSpawner:
    """Starts processes on this host. A context manager; none may run any more at its exit (see kill_all)."""

    def __init__(self) -> None:
        self._sessions: set[int] = set()
        self._mark = secrets.token_hex(16)
        self._guard: Guard          # set within the context

    def __enter__(self):
        self._guard = Guard(self._mark)
        return self

    def __exit__(self, *exception):
        self._guard.close()

    def start(self, task: Task) -> Process:
        """Starts a supervisor.Task and returns its Process. OSError: no more processes or descriptors."""
        env = {**(os.environ if task.env is None else task.env), MARK: self._mark}
        process = Process(task.name, task.command, env, pipe_variable=PIPE if env.get(PIPE) == "" else None)
        self._sessions.add(process.pid)
        self._guard.watch(process.pid)
        return process

    def signal_all(self, signum: int) -> None:
        """Sends the signal to every process and its descendants."""
        signal_sessions(self._sessions, signum, self._mark)

    def any_left(self) -> bool:
        """Whether a process runs, or one of its background processes, including daemons."""
        return bool(members(self._sessions, self._mark))

    def kill_all(self) -> None:
        """Sends SIGKILL to everything that runs; returns when nothing runs any more."""
        kill_sessions(self._sessions, self._mark)


class Spawner:
    """Starts each process on the host named by its task, by ssh unless it is this host.

    Args:
        remote: the spawner for all other hosts.
    """

    def __init__(self, remote: AnySpawner) -> None:
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

    def start(self, task: Task) -> AnyProcess:
        local = task.host is None or is_local(task.host)
        return (self._local if local else self._remote).start(task)

    def signal_all(self, signum: int) -> None:
        """Sends the signal to every process and its descendants. SIGKILL leaves none behind."""
        for spawner in self._all:
            spawner.signal_all(signum)

    def any_left(self) -> bool:
        """Whether a process of the job runs on any host."""
        return any(spawner.any_left() for spawner in self._all)

    def kill_all(self) -> None:
        """Sends SIGKILL to everything that runs; returns when nothing runs on this host any more."""
        for spawner in self._all:
            spawner.kill_all()
