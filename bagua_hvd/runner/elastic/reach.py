"""The interface of each host, and its address for the launcher: found by trying at a host's first use."""
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from bagua_hvd.runner.job import is_local
from bagua_hvd.runner.ssh.connection import HostOptions, RemoteHost
from bagua_hvd.runner.ssh.network import LAUNCHER, Network, NoRoute, Place, local_place
from bagua_hvd.runner.ssh.spawner import SshSpawner

_PAUSE_SECONDS = 1      # after the first attempt; doubled after each further one


class Reach:
    """The Places of hosts. Hosts are connected in parallel, each only once however many threads wait for it.

    Args:
        call: function that makes the supervisor's loop call a function, and returns a Future.
    """

    def __init__(self, ssh: SshSpawner, options: HostOptions,
                 call: Callable[[Callable[[], RemoteHost]], Future[RemoteHost]]) -> None:
        self._ssh = ssh
        self._options = options
        self._call = call
        self._lock = threading.Lock()
        self._attempts: dict[str, Future[Place]] = {}     # running attempts
        self._remotes: dict[str, RemoteHost] = {}       # by name
        self._network = Network(options.nics)
        self._joined: dict[str, RemoteHost] = {}        # hosts in the network, by name; guarded by _probing
        self._probing = threading.Lock()
        self._here = local_place(options.nics)

    def find(self, host: str) -> Place:
        """The Place of a host in relation to the launcher's; connects to the host if needed. Blocks.

        Raises:
            RuntimeError, OSError: it cannot be used, not even after start_timeout; the message says why.
        """
        if is_local(host):
            return self._here
        with self._lock:
            mine = host not in self._attempts
            attempt = self._attempts.setdefault(host, Future())
        if mine:
            try:
                attempt.set_result(self._connect(host))
            except Exception as error:
                attempt.set_exception(error)
            with self._lock:
                del self._attempts[host]
        return attempt.result()

    def _connect(self, host):
        left, pause = float(self._options.timeout_seconds), _PAUSE_SECONDS
        while True:
            began = time.monotonic()
            try:
                # No limit: while baguarun's output is not read, its loop waits.
                remote = self._call(lambda: self._ssh.host(host)).result()
                began = time.monotonic()
                if self._remotes.get(host) is not remote:
                    self._use(remote, left)
                return Place(self._network.likely_interface(host), self._network.rendezvous(host, [host]))
            except OSError:     # its sshd is not running yet, or this process has too few descriptors
                left -= time.monotonic() - began + pause
                if left < 0:
                    raise
                time.sleep(pause)
                pause *= 2

    def _use(self, remote, timeout):
        if not remote.wait_ready(timeout):
            raise (ConnectionError if remote.ssh_failed else RuntimeError)(remote.error)
        self._join(remote, self._options.timeout_seconds)
        self._remotes[remote.name] = remote

    def _join(self, remote, timeout):
        silent = set()
        with self._probing:
            while True:
                others = [other for other in self._joined.values()
                          if other.name != remote.name and other.ready and other.name not in silent]
                try:
                    self._network.join([remote], others, timeout)
                    # Before the next host joins, or the two would never try to reach each other.
                    self._joined[remote.name] = remote
                    return
                except ConnectionError:
                    if not remote.ready or all(other.ready for other in others):
                        raise
                except NoRoute as error:
                    # A failure between old hosts must not exclude the new one.
                    if not error.hosts <= {other.name for other in others}:
                        raise
                    silent |= error.hosts

    def interface(self, host: str, hosts: Iterable[str]) -> str:
        """The interface by which the workers of `host` connect to those of `hosts`. Never blocks.

        NoRoute: there is none; its `hosts` are names of hosts other than the launcher's.
        """
        among = [LAUNCHER if is_local(name) else name for name in hosts]
        if set(among) == {LAUNCHER}:
            return self._here.interface
        try:
            return self._network.interface(LAUNCHER if is_local(host) else host, list(dict.fromkeys(among)))
        except NoRoute as error:
            raise NoRoute(str(error), error.hosts - {LAUNCHER}) from None
