"""By which interface each host takes part, and where it meets the launcher: found out when a host is used first."""
import concurrent.futures
import threading

from bagua_hvd.runner.job import LOOPBACK, is_local
from bagua_hvd.runner.ssh.network import Place, find_places

_HERE = "localhost"


class Reach:
    """The Places of hosts.

    Args:
        ssh: SshSpawner. options: HostOptions.
        call: function that has the supervisor's loop call a function, and returns a Future.
        on_connected: called with each RemoteHost before processes are started there. None: nothing is.
    """

    def __init__(self, ssh, options, call, on_connected=None):
        self._ssh = ssh
        self._options = options
        self._call = call
        self._on_connected = on_connected
        self._lock = threading.Lock()
        self._places = {}           # name -> (RemoteHost, Place)
        self._among_others = Place(LOOPBACK, "127.0.0.1")      # this host's, once there is another one

    def find(self, host):
        """The Place of a host, which is connected to if need be. Blocks.

        Raises:
            RuntimeError, ConnectionError: it cannot be used; the sentence says why.
        """
        if is_local(host):
            return Place(LOOPBACK, "127.0.0.1")
        with self._lock:        # one host at a time
            timeout = self._options.ssh.timeout_seconds
            try:
                remote = self._call(lambda: self._ssh.host(host)).result(timeout)
            except concurrent.futures.TimeoutError:     # no TimeoutError before Python 3.11
                raise RuntimeError(f"host {host} was not connected to: baguarun did nothing for {timeout} s; does "
                                   "anybody read its output?") from None
            known = self._places.get(host)
            if known is not None and known[0] is remote:
                return known[1]
            remote.wait_ready(timeout)
            if remote.error is not None:
                raise RuntimeError(remote.error)
            places, _ = find_places([remote], [_HERE], self._options.nics, timeout)
            if self._on_connected is not None:
                self._on_connected(remote)
            self._among_others = places[_HERE]
            self._places[host] = remote, places[host]
            return places[host]

    def remote(self, host):
        """The RemoteHost on which find() was successful last; None: the host is this one."""
        return None if is_local(host) else self._places[host][0]

    def interface(self, host, hosts):
        """The interface by which the workers of `host` connect with those of `hosts`. Never blocks."""
        if not is_local(host):
            return self._places[host][1].interface
        return LOOPBACK if all(map(is_local, hosts)) else self._among_others.interface
