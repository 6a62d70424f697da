"""Finds the addresses at which other hosts can reach a host, by connecting. Needs only Python's own modules.

Several hosts may have the same address (a container bridge, loopback), so the host that responds must prove that it is
the intended one: the handshake's secret is derived from its name and a key, which belongs to one job and goes by ssh.
"""
import base64
import fcntl
import hmac
import ipaddress
import socket
import struct
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from bagua_hvd.job.channel import Connection
from bagua_hvd.job.server import EVERY_INTERFACE, Server

LOOPBACK = "lo"
_SIOCGIFADDR = 0x8915
_IPV6_TABLE = "/proc/net/if_inet6"      # ioctls support only IPv4
_IPV6_GLOBAL = "00"
# IFA_F_TEMPORARY, IFA_F_DADFAILED, IFA_F_DEPRECATED, IFA_F_TENTATIVE: short-lived or unusable addresses.
_IPV6_UNFIT = 0x01 | 0x08 | 0x20 | 0x40
_TIMEOUT_SECONDS = 3
_PARALLEL = 64


def interface_of(name: str) -> str:
    """The interface in one of the names that addresses() returns."""
    return name.rpartition("%")[2]


def interface_names(*given: str | Iterable[str] | None) -> list[str] | None:
    """Names of interfaces, given as text with commas or as collections of names; None: none."""
    names: list[str] = []
    for value in given:
        names += value.split(",") if isinstance(value, str) else value or []
    return [name.strip() for name in names if name.strip()] or None


def addresses(nics: Collection[str] | None = None) -> list[list[str]]:
    """[[name, address], ...] of this host, IPv4 first, loopback last; with `nics`, only of the named ones.

    The first address of an interface has the interface's name; others are named like `fd00::2%eth0`. Link-local
    addresses are left out.
    """
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                packed = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue    # has no IPv4 address
            found.append([name, socket.inet_ntoa(packed[20:24])])
    with suppress(FileNotFoundError), open(_IPV6_TABLE) as table:
        for digits, _, _, scope, flags, name in map(str.split, table):
            if scope == _IPV6_GLOBAL and not int(flags, 16) & _IPV6_UNFIT:
                address = str(ipaddress.IPv6Address(bytes.fromhex(digits)))
                found.append([f"{address}%{name}" if any(name == other for other, _ in found) else name, address])
    found.sort(key=lambda pair: pair[1].startswith("127."))
    return [[name, address] for name, address in found if not nics or {name, interface_of(name)} & set(nics)]


def _secret(key, name):
    return hmac.digest(key, name.encode(), "sha256")


class Requests:
    """Requests of the launcher to each host, its own too; arguments and results are JSON-serializable. Any thread."""

    def __init__(self) -> None:
        self._targets: dict[str, Server] = {}       # by key: they prove to other hosts that those reach this one

    def listen(self, name: str, key: str, nics: Collection[str] | None, ports: Sequence[int]) -> dict[str, Any]:
        """Opens a target; returns its port and this host's addresses(nics). key: base64. ports: see job/server.py."""
        target = self._targets[key] = Server(_secret(base64.b64decode(key), name), EVERY_INTERFACE, "probe", ports)
        return {"port": target.port, "addresses": addresses(nics)}

    def reachable(self, targets: Sequence[Sequence[Any]], key: str, timeout: float) -> list[Sequence[Any]]:
        """The entries of `targets`, [[name, address, port], ...], that this host reaches within `timeout` seconds."""
        deadline, secret = time.monotonic() + timeout, base64.b64decode(key)
        with ThreadPoolExecutor(_PARALLEL) as pool:
            reached = pool.map(lambda target: _reaches(target, secret, deadline), targets)
            return [target for target, success in zip(targets, reached, strict=True) if success]

    def stop_listening(self, key: str) -> None:
        """Closes the target with this key, if there is one."""
        target = self._targets.pop(key, None)
        if target is not None:
            target.close()

    def close(self) -> None:
        """Closes all targets."""
        for key in list(self._targets):
            self.stop_listening(key)


def _reaches(target, key, deadline):
    name, address, port = target
    seconds = min(_TIMEOUT_SECONDS, max(0.001, deadline - time.monotonic()))
    try:
        Connection(address, port, _secret(key, name), seconds).close()
    except OSError:
        return False
    return True


def connect(addresses: Sequence[Sequence[Any]], secret: bytes, seconds: float) -> Connection:
    """The Connection to the first of these [host, port] pairs that responds; to an IPv6 one only if no other does.

    Tries them in parallel, since some may be unreachable, each for `seconds`. OSError: none responds.
    """

    def attempt(address):
        try:
            return Connection(address[0], address[1], secret, seconds)
        except OSError as error:
            return error

    found: list = []
    with ThreadPoolExecutor(_PARALLEL) as pool:
        for by_6 in (False, True):
            found += pool.map(attempt, [address for address in addresses if (":" in address[0]) == by_6])
            connections = [each for each in found if isinstance(each, Connection)]
            if connections:
                break
    for connection in connections[1:]:
        connection.close()
    if not connections:
        raise found[0]
    return connections[0]
