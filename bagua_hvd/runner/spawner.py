"""Starts processes of a job on this host, and on others over ssh, through one interface.

A spawner belongs to the thread that runs the supervisor's loop.
"""
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bagua_hvd.job.reporting import PIPE
from bagua_hvd.runner.common.util.hosts import is_local
from bagua_hvd.runner.output import Sink
from bagua_hvd.runner.processes import MARK, Guard, Process, kill_sessions, members, signal_sessions
from bagua_hvd.runner.ssh.connection import HostOptions, RemoteHost, RemoteProcess
from bagua_hvd.runner.ssh.frames import Kind

AnyProcess = Process | RemoteProcess

# Between SIGTERM and SIGKILL.
GRACE_SECONDS = 5
# Time for another host to stop background processes, and for the connection to end.
_CLOSE_SECONDS = GRACE_SECONDS + 5


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


class Spawner:
    """Starts each process on the host that its task names, and connects to other hosts when they are first named.

    A context manager; no process may run any more at its exit (see kill_all).

    Args:
        options, environment: for other hosts; the environment is the launcher's.
    Attributes:
        say: called in any thread with a line from a host's agent.
    """

    def __init__(self, options: HostOptions | None = None, environment: Mapping[str, str] | None = None) -> None:
        self._options = options or HostOptions()
        self._environment = dict(environment or {})
        self._hosts: dict[str, RemoteHost] = {}
        self._sessions: set[int] = set()
        self._mark = secrets.token_hex(16)
        self._guard: Guard          # set within the context
        self.say: Callable[[str], object] = lambda text: None

    def __enter__(self):
        self._guard = Guard(self._mark)
        return self

    def __exit__(self, *exception):
        try:
            for host in self._hosts.values():
                host.send(Kind.FINISH)
            end = time.monotonic() + _CLOSE_SECONDS
            for host in self._hosts.values():
                host.close(max(0, end - time.monotonic()) if host.ready else 0)
        finally:
            self._guard.close()

    def start(self, task: Task) -> AnyProcess:
        """Starts a task and returns its process. OSError: no more processes or descriptors."""
        env = os.environ if task.env is None else task.env
        if task.host is not None and not is_local(task.host):
            return self.host(task.host).start(task.name, task.command, env)
        process = Process(task.name, task.command, {**env, MARK: self._mark},
                          pipe_variable=PIPE if env.get(PIPE) == "" else None)
        self._sessions.add(process.pid)
        self._guard.watch(process.pid)
        return process

    def host(self, name: str) -> RemoteHost:
        """The RemoteHost of this name; connects to it unless it is connected already."""
        host = self._hosts.get(name)
        if host is not None and host.error is not None and not host.any_left():
            host.close(0)
            host = None
        if host is None:
            host = self._hosts[name] = RemoteHost(name, self._options, self._environment, lambda text: self.say(text))
        return host

    def connect(self, names: Iterable[str], report: Callable[[str], object]) -> list[RemoteHost]:
        """The RemoteHosts of these names, ready to start processes. Connects to all in parallel.

        Args:
            report: called with a line for each host that is ready.
        Raises:
            RuntimeError: not all are ready within the options' timeout; a line for each of these.
        """
        began = time.monotonic()
        hosts = [self.host(name) for name in names]
        for host in hosts:
            if host.wait_ready(max(0, began + self._options.timeout_seconds - time.monotonic())):
                report(f"{host.name}: connected by ssh")
        errors = [host.error for host in hosts if host.error is not None]
        if errors:
            raise RuntimeError("\n".join(errors))
        return hosts

    def signal_all(self, signum: int) -> None:
        """Sends the signal to every process and its descendants. SIGKILL leaves none behind."""
        signal_sessions(self._sessions, signum, self._mark)
        for host in self._hosts.values():
            host.send(Kind.SIGNAL_ALL, 0, signum)

    def any_left(self) -> bool:
        """Whether a process runs on any host, or here one of its background processes, including daemons."""
        return bool(members(self._sessions, self._mark)) or self._any_remote()

    def _any_remote(self):
        return any(host.any_left() for host in self._hosts.values())

    def kill_all(self) -> None:
        """Returns when nothing runs on this host any more, and other hosts have reported the ends of their processes,
        or after _CLOSE_SECONDS. Background processes there end with the connection.
        """
        kill_sessions(self._sessions, self._mark)
        for host in self._hosts.values():
            if host.any_left():
                host.send(Kind.SIGNAL_ALL, 0, signal.SIGKILL)
        end = time.monotonic() + _CLOSE_SECONDS
        while self._any_remote() and time.monotonic() < end:
            time.sleep(0.01)
