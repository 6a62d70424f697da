"""Which addresses of a host others can reach, found by connecting. Needs nothing but Python's own modules.

Several hosts may have one address (a bridge for containers, loopback), so who answers must prove to be the host that is
meant: the secret of the handshake is made of its name and a key, which is of one job and goes through ssh.
"""
import base64
import fcntl
import hmac
import ipaddress
import math
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from bagua_hvd.job.channel import Connection
from bagua_hvd.job.ports import EVERY_INTERFACE
from bagua_hvd.job.server import Server

_SIOCGIFADDR = 0x8915
_IPV6_TABLE = "/proc/net/if_inet6"      # ioctls know only IPv4
_IPV6_GLOBAL = "00"
# IFA_F_TEMPORARY, IFA_F_DADFAILED, IFA_F_DEPRECATED, IFA_F_TENTATIVE: they end soon, or cannot be used.
_IPV6_UNFIT = 0x01 | 0x08 | 0x20 | 0x40
_TIMEOUT_SECONDS = 3
_PARALLEL = 64


def interface_of(name):
    """The interface of one of the names that addresses() gives."""
    return name.rpartition("%")[2]


def addresses(nics=None):
    """[[name, address], ...] of this host, IPv4 first, loopback last; with `nics`, names, of these only.

    The first address of an interface is named as the interface, others `fd00::2%eth0`. Those that are of one link are
    left out.
    """
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue    # none of IPv4
            found.append([name, socket.inet_ntoa(answer[20:24])])
    with suppress(FileNotFoundError), open(_IPV6_TABLE) as table:
        for digits, _, _, scope, flags, name in map(str.split, table):
            if scope == _IPV6_GLOBAL and not int(flags, 16) & _IPV6_UNFIT:
                address = str(ipaddress.IPv6Address(bytes.fromhex(digits)))
                found.append([f"{address}%{name}" if any(name == other for other, _ in found) else name, address])
    found.sort(key=lambda pair: pair[1].startswith("127."))
    return [[name, address] for name, address in found if not nics or {name, interface_of(name)} & set(nics)]


class Target(Server):
    """Lets others find out that they reach this host, from construction to close().

    Args:
        name, key: the host's, and the job's; bytes. host: the address to listen at; default all.
        ports: as for listen().
    Attributes:
        port.
    """

    def __init__(self, name, key, host=EVERY_INTERFACE, ports=None):
        super().__init__(_secret(key, name), host, "probe", ports)

    async def talk(self, reader, writer):
        """Nothing: both have proved who they are."""


def _secret(key, name):
    return hmac.digest(key, name.encode(), "sha256")


class Requests:
    """What the launcher asks of each host, its own too, whose arguments and answers JSON can hold. Any thread."""

    def __init__(self):
        self._targets = {}          # key -> Target

    def listen(self, name, key, nics, ports):
        """Opens a Target; its port, and this host's addresses(nics). key: base64. ports: see bagua_hvd.job.ports."""
        target = self._targets[key] = Target(name, base64.b64decode(key), ports=ports)
        return {"port": target.port, "addresses": addresses(nics)}

    def reachable(self, targets, key, timeout):
        """See reachable()."""
        return reachable(targets, base64.b64decode(key), timeout)

    def stop_listening(self, key):
        """Closes the Target of that key, if there is one."""
        target = self._targets.pop(key, None)
        if target is not None:
            target.close()

    def close(self):
        """Closes all Targets."""
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


def by_family(addresses):
    """Two lists: of IPv4, and of IPv6, to be tried when none of the first is reached."""
    return [[address for address in addresses if (":" in address) == by_6] for by_6 in (False, True)]


def reachable(targets, key, timeout=math.inf):
    """Those of targets, [[name, address, port], ...], that this host reaches within a time, in their order."""
    deadline = time.monotonic() + timeout
    with ThreadPoolExecutor(_PARALLEL) as pool:
        reached = pool.map(lambda target: _reaches(target, key, deadline), targets)
        return [target for target, success in zip(targets, reached, strict=True) if success]
