"""Finds the interface of each host, and the address at which it reaches the launcher, by trying.

Any two ranks may connect, so every host tries the addresses of every other one and of the launcher's host. A host uses
its first interface, in its own order, whose address all others reach.
"""
import base64
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

from bagua_hvd.core import variables
from bagua_hvd.job import probe
from bagua_hvd.job.server import EVERY_INTERFACE
from bagua_hvd.runner.common.util.hosts import is_local
from bagua_hvd.runner.spawner import Spawner
from bagua_hvd.runner.ssh.connection import HostOptions, RemoteHost

LAUNCHER = "launcher's host"
# Time for a host's response, within the total limit.
_RESPONSE_SECONDS = 2
_PAUSE_SECONDS = 1      # after Reach's first attempt; doubled after each further one


class NoRoute(RuntimeError):
    """Hosts cannot reach each other; the message says which, and the addresses tried. hosts: their names."""

    def __init__(self, sentence: str, hosts: set[str]) -> None:
        super().__init__(sentence)
        self.hosts = hosts


@dataclass(frozen=True)
class Place:
    """The addresses of a host in the job.

    Attributes:
        interface: for the ranks' data connections, named as by probe.addresses().
        rendezvous: the launcher's address, as this host reaches it.
    """

    interface: str
    rendezvous: str


def local_place(nics: list[str] | None = None) -> Place:
    """The Place of this host in a job without other hosts. NoRoute: it has none of the allowed interfaces."""
    if not nics:
        return Place(probe.LOOPBACK, "127.0.0.1")
    return Place(own_addresses(nics)[0][0], "127.0.0.1")


def own_addresses(nics: list[str] | None = None) -> list[list[str]]:
    """probe.addresses(nics), at least one. NoRoute: this host has none of the allowed interfaces."""
    found = probe.addresses(nics)
    if not found:
        raise _no_interface("localhost", nics)
    return found


def _here():
    """RemoteHost.request() for the launcher's own host: its Futures are completed."""
    requests = probe.Requests()

    def request(function, **arguments):
        future: Future[Any] = Future()
        future.set_result(getattr(requests, function)(**arguments))
        return future

    return request


class Network:
    """The addresses at which hosts reach each other, as far as tried. nics: allowed interfaces; None: all."""

    def __init__(self, nics: list[str] | None = None) -> None:
        self._nics = nics
        self._addresses: dict[str, list[Any]] = {}      # host -> [(interface, address), ...] in the host's order
        self._reached: dict[tuple[str, str], set[str]] = {}     # addresses by (source, host); missing: not tried
        self._tried: set[tuple[str, str, str]] = set()      # (source, host, address)

    def join(self, newcomers: Collection[RemoteHost], others: Collection[RemoteHost], timeout: float) -> None:
        """Tries all pairs with a newcomer or the launcher's host; IPv6 only if IPv4 does not suffice.

        Args:
            newcomers, others: RemoteHosts, ready; hosts that joined before are others. A host that is left out counts
                as reached until it takes part again.
            timeout: seconds in total.
        Raises:
            NoRoute: a host did not report its addresses and results in time, or cannot, or has no allowed interface.
                ConnectionError: a connection was lost.
        """
        deadline = time.monotonic() + timeout
        key = base64.b64encode(secrets.token_bytes(32)).decode()
        # The launcher's own requests block, so they come last.
        hosts = {**{host.name: host.request for host in [*newcomers, *others]}, LAUNCHER: _here()}
        names = {host.name for host in newcomers}
        try:
            ports = list(variables.read("BAGUA_HVD_PORTS"))
            asked = {name: request("listen", name=name, key=key, nics=self._nics, ports=ports)
                     for name, request in hosts.items()}
            found = {name: _response(name, future, deadline, timeout) for name, future in asked.items()}
            for name, each in found.items():
                self._addresses[name] = list(map(tuple, each["addresses"]))
                if not each["addresses"]:
                    raise _no_interface(name, self._nics)
            self._tried = {one for one in self._tried if not names & {*one}}
            reached = {pair: addresses for pair, addresses in self._reached.items() if not names & {*pair}}
            for pair in itertools.permutations(hosts, 2):
                reached.setdefault(pair, set())
            self._reached = reached     # in one assignment: other threads read it
            for by_6 in (False, True):
                targets = {name: [[other, address, found[other]["port"]]
                                  for other in hosts if other != name for _, address in self._addresses[other]
                                  if (":" in address) == by_6 and (name, other, address) not in self._tried]
                           for name in hosts}
                seconds = max(0.1, deadline - time.monotonic() - _RESPONSE_SECONDS)
                asked = {name: request("reachable", key=key, timeout=seconds, targets=targets[name])
                         for name, request in hosts.items()}
                for name, future in asked.items():
                    for other, address, _ in _response(name, future, deadline, timeout):
                        self._reached[name, other].add(address)
                self._tried.update((name, *target[:2]) for name in hosts for target in targets[name])
                if self._is_complete(hosts):
                    break
        finally:
            for request in hosts.values():
                request("stop_listening", key=key)

    def _is_complete(self, hosts):
        """Whether every host has an address that all others reach, as far as tried."""
        try:
            for name in hosts:
                self.interface(name, hosts)
        except NoRoute:
            return False
        return True

    def interface(self, name: str, among: Iterable[str]) -> str:
        """The first interface of host `name` whose address all hosts of `among`, names or LAUNCHER, reach.

        NoRoute: there is none.
        """
        reached = self._reached
        others = [other for other in among if (other, name) in reached]     # this excludes name itself, too
        missed = {(interface, address): [other for other in others if address not in reached[other, name]]
                  for interface, address in self._addresses[name]}
        for (interface, _), by in missed.items():
            if not by:
                return interface
        for other in others:
            if not reached[other, name]:
                raise self._no_route(other, name)
        tried = "; ".join(f"{address} ({interface}) not from {', '.join(by)}"
                          for (interface, address), by in missed.items())
        raise NoRoute(f"no address of host {name} can be reached from all other hosts ({tried}): connect them by one "
                      "network, and name its interface with --network-interfaces", {name, *others})

    def likely_interface(self, name: str) -> str:
        """The interface of a host that most others reach, while the hosts of its job are not yet known."""
        reached = [by for (_, host), by in self._reached.items() if host == name]
        return max(self._addresses[name], key=lambda pair: sum(pair[1] in by for by in reached))[0]

    def rendezvous(self, name: str, among: Iterable[str]) -> str:
        """The launcher's address for a host; for the launcher's own ranks, that for the first other host in `among`."""
        if name == LAUNCHER:
            name = next(other for other in among if other != LAUNCHER)
        for _, address in self._addresses[LAUNCHER]:
            if address in self._reached[name, LAUNCHER]:
                return address
        raise self._no_route(name, LAUNCHER)

    def _no_route(self, source, name):
        addresses = self._addresses[name]
        if all(address.startswith("127.") for _, address in addresses):
            return NoRoute(f"host {name} has no address but loopback: give it one that host {source} can reach",
                           {source, name})
        tried = ", ".join(f"{address} ({interface})" for interface, address in addresses)
        return NoRoute(f"host {source} reaches host {name} at none of {tried}: open the ports between the hosts, or "
                       "name the interface they share by --network-interfaces", {source, name})


def _no_interface(name, nics):
    given = f" of {','.join(nics)}" if nics else ""
    return NoRoute(f"host {name} has no interface{given} with an IPv4 or global IPv6 address: name others by "
                   "--network-interfaces or HOROVOD_GLOO_IFACE", {name})


def _response(name, future, deadline, timeout):
    try:
        return future.result(max(0, deadline - time.monotonic()))
    except ConnectionError:
        raise
    except FutureTimeoutError:      # not a TimeoutError before Python 3.11
        raise NoRoute(f"host {name} did not report within {timeout} s which addresses it has and can reach: check "
                      "whether it is overloaded, or raise --start-timeout", {name}) from None
    except RuntimeError as error:
        raise NoRoute(str(error), {name}) from None


def find_places(remote: Collection[RemoteHost], local: Collection[str],
                options: HostOptions) -> tuple[dict[str, Place], str]:
    """({host: Place}, address to bind the rendezvous to) of a job of fixed size.

    Args:
        remote: ready, in the order of the ranks. local: names of this host used by ranks.
    Raises:
        As Network.join().
    """
    if not remote:
        return dict.fromkeys(local, local_place(options.nics)), "127.0.0.1"
    network = Network(options.nics)
    network.join(remote, [], options.timeout_seconds)
    among = ([LAUNCHER] if local else []) + [host.name for host in remote]
    places = {name: Place(network.interface(name, among), network.rendezvous(name, among)) for name in among}
    addresses = {place.rendezvous for place in places.values()}
    places.update({name: places[LAUNCHER] for name in local})
    # If hosts reach the launcher at different addresses, it listens on all; every rank must authenticate.
    return places, addresses.pop() if len(addresses) == 1 else EVERY_INTERFACE


class Reach:
    """The Places of the hosts of an elastic job, each found at the host's first use. Hosts are connected in parallel,
    each only once however many threads wait for it.

    Args:
        call: function that makes the supervisor's loop call a function, and returns a Future.
    """

    def __init__(self, spawner: Spawner, options: HostOptions,
                 call: Callable[[Callable[[], RemoteHost]], Future[RemoteHost]]) -> None:
        self._spawner = spawner
        self._options = options
        self._call = call
        self._lock = threading.Lock()
        self._attempts: dict[str, Future[Place]] = {}     # running attempts
        self._network = Network(options.nics)
        self._joined: dict[str, RemoteHost] = {}        # hosts in the network, by name; written under _probing
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
                remote = self._call(lambda: self._spawner.host(host)).result()
                began = time.monotonic()
                if self._joined.get(host) is not remote:
                    if not remote.wait_ready(left):
                        raise (ConnectionError if remote.ssh_failed else RuntimeError)(remote.error)
                    self._join(remote)
                return Place(self._network.likely_interface(host), self._network.rendezvous(host, [host]))
            except OSError:     # its sshd is not running yet, or this process has too few descriptors
                left -= time.monotonic() - began + pause
                if left < 0:
                    raise
                time.sleep(pause)
                pause *= 2

    def _join(self, remote):
        silent = set()
        with self._probing:
            while True:
                others = [other for other in self._joined.values()
                          if other.name != remote.name and other.ready and other.name not in silent]
                try:
                    self._network.join([remote], others, self._options.timeout_seconds)
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
