"""Starts processes on other hosts; the counterpart of runner.spawner.LocalSpawner."""
import signal
import time
from collections.abc import Callable, Iterable, Mapping

from bagua_hvd.runner.spawner import Task
from bagua_hvd.runner.ssh.connection import HostOptions, RemoteHost, RemoteProcess
from bagua_hvd.runner.ssh.frames import Kind
from bagua_hvd.runner.supervisor import GRACE_SECONDS

# Time for the host to stop background processes, and for the connection to end.
_CLOSE_SECONDS = GRACE_SECONDS + 5


class UnreachableHosts(RuntimeError):
    """Hosts that cannot be used; the message has a line for each."""


class SshSpawner:
    """Connects to hosts when they are first named; its exit ends all connections, and all processes there.

    Args:
        environment: the launcher's.
    Attributes:
        say: called in any thread with a line from a host's agent.
    """

    def __init__(self, options: HostOptions, environment: Mapping[str, str]) -> None:
        self._options = options
        self._environment = dict(environment)
        self._hosts: dict[str, RemoteHost] = {}
        self.say = lambda text: None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for host in self._hosts.values():
            host.finish()
        end = time.monotonic() + _CLOSE_SECONDS
        for host in self._hosts.values():
            host.close(max(0, end - time.monotonic()) if host.ready else 0)

    def host(self, name: str) -> RemoteHost:
        """The RemoteHost of this name; connects to it unless it is connected already."""
        host = self._hosts.get(name)
        if host is not None and host.error is not None and not host.any_left():
            host.close(0)
            host = None
        if host is None:
            host = self._hosts[name] = RemoteHost(name, self._options, self._environment, lambda text: self.say(text))
        return host

    def connect(self, names: Iterable[str], report: Callable[[str], object] = lambda text: None) -> list[RemoteHost]:
        """The RemoteHosts of these names, ready to start processes. Connects to all in parallel.

        Args:
            report: called with a line for each host that is ready.
        Raises:
            UnreachableHosts: not all are ready within the options' timeout.
        """
        began = time.monotonic()
        hosts = [self.host(name) for name in names]
        for host in hosts:
            if host.wait_ready(max(0, began + self._options.timeout_seconds - time.monotonic())):
                report(f"{host.name}: connected by ssh")
        errors = [host.error for host in hosts if host.error is not None]
        if errors:
            raise UnreachableHosts("\n".join(errors))
        return hosts

    def start(self, task: Task) -> RemoteProcess:
        """Starts a supervisor.Task, see RemoteHost.start. OSError: no more processes or descriptors."""
        assert task.host is not None
        return self.host(task.host).start(task)

    def signal_all(self, signum: int) -> None:
        """Sends the signal to all processes on all hosts."""
        for host in self._hosts.values():
            host.send(Kind.SIGNAL_ALL, 0, signum)

    def any_left(self) -> bool:
        """Whether a started process still runs."""
        return any(host.any_left() for host in self._hosts.values())

    def kill_all(self) -> None:
        """Sends SIGKILL where a process still runs; returns when the hosts have reported their ends, or after
        _CLOSE_SECONDS. Background processes end with the connection.
        """
        for host in self._hosts.values():
            if host.any_left():
                host.send(Kind.SIGNAL_ALL, 0, signal.SIGKILL)
        end = time.monotonic() + _CLOSE_SECONDS
        while self.any_left() and time.monotonic() < end:
            time.sleep(0.01)
