"""Which interface each host uses, and where the launcher is met: found by trying.

Every host tries the addresses of the next one (the last those of the first) and of the launcher's host. An interface is
taken when it was reached, in the order in which the host lists them.
"""
import base64
import concurrent.futures
import secrets
from dataclasses import dataclass

from bagua_hvd.job import probe

_LAUNCHER = "launcher's host"


class NoRoute(RuntimeError):
    """Hosts do not reach each other; the sentence says which, and where it was tried."""


@dataclass(frozen=True)
class Place:
    """How the ranks of a host take part.

    Attributes:
        interface: for their data connections.
        rendezvous: the launcher's address as this host reaches it.
    """

    interface: str
    rendezvous: str


class _Here:
    """This host, with the requests that an agent understands."""

    def __init__(self):
        self._target = None

    def request(self, function, **arguments):
        """A future, done."""
        return _Done(getattr(self, "_" + function)(**arguments))

    def _listen(self, name, key, nics):
        self._target = probe.Target(name, base64.b64decode(key))
        return {"port": self._target.port, "addresses": probe.addresses(nics)}

    @staticmethod
    def _reachable(targets, key):
        return probe.reachable(targets, base64.b64decode(key))

    def stop_listening(self):
        """Idempotent."""
        if self._target is not None:
            self._target.close()


@dataclass(frozen=True)
class _Done:
    value: object

    def result(self, timeout=None):
        """The value."""
        return self.value


def _targets(name, found):
    return [[name, address, found["port"]] for _, address in found["addresses"]]


def _first(found, reached, name):
    """(interface, address): the first of the host's that were reached; None: none was."""
    reached = {address for target, address, _ in reached if target == name}
    return next((pair for pair in map(tuple, found["addresses"]) if pair[1] in reached), None)


def _no_route(source, name, found, nics):
    tried = ", ".join(f"{address} ({nic})" for nic, address in found["addresses"])
    if not tried:
        given = f" of {','.join(nics)}" if nics else ""
        return NoRoute(f"host {name} has no interface{given} with an IPv4 address: name others by --network-interfaces")
    return NoRoute(f"host {source} reaches host {name} at none of {tried}: open the ports between the hosts, or name "
                   "the interface they share by --network-interfaces")


def _answer(name, future, timeout):
    try:
        return future.result(timeout)
    except concurrent.futures.TimeoutError:     # no TimeoutError before Python 3.11
        raise NoRoute(f"host {name} did not say within {timeout} s which addresses it has and reaches: see whether it "
                      "is overloaded, or raise --start-timeout") from None


def find_places(remote, local, nics, timeout):
    """({host: Place}, whether all hosts meet the launcher at one address).

    Args:
        remote: RemoteHosts, ready, in the order of the ranks.
        local: names by which ranks of this host run, in this order; they come before the remote ones.
        nics: names of allowed interfaces; None: all.
    Raises:
        NoRoute: a host does not reach another one, or did not answer in time. ConnectionError: a connection was lost.
        RuntimeError: a host cannot say which addresses it has.
    """
    key = base64.b64encode(secrets.token_bytes(32)).decode()
    here = _Here()
    try:
        hosts = {_LAUNCHER: here, **{host.name: host for host in remote}}
        asked = {name: host.request("listen", name=name, key=key, nics=nics) for name, host in hosts.items()}
        found = {name: _answer(name, future, timeout) for name, future in asked.items()}
        ring = ([_LAUNCHER] if local else []) + [host.name for host in remote]
        following = dict(zip(ring, ring[1:] + ring[:1], strict=True))
        asked = {
            name: hosts[name].request("reachable", key=key, targets=_targets(_LAUNCHER, found[_LAUNCHER])
                                      + _targets(following[name], found[following[name]]))
            for name in ring
        }
        reached = {name: _answer(name, future, timeout) for name, future in asked.items()}
        for host in remote:
            host.request("stop_listening")
    finally:
        here.stop_listening()
    return _places(ring, following, local, found, reached, nics)


def _places(ring, following, local, found, reached, nics):
    def first(source, name):
        pair = _first(found[name], reached[source], name)
        if pair is None:
            raise _no_route(source, name, found[name], nics)
        return pair

    interfaces = {following[name]: first(name, following[name])[0] for name in ring}
    meeting = {name: first(name, _LAUNCHER)[1] for name in ring if name != _LAUNCHER}
    # The launcher's own ranks meet where the others do.
    meeting[_LAUNCHER] = next(iter(meeting.values()))
    places = {name: Place(interfaces[name], meeting[name]) for name in ring}
    places.update({name: places[_LAUNCHER] for name in local})
    return places, len(set(meeting.values())) == 1
