"""Listening sockets of this package's Python side; the core's ranks listen in native/transport."""
import errno
import socket
from collections.abc import Sequence

from bagua_hvd.core import variables

EVERY_INTERFACE = "::"      # for listen() and Rendezvous: IPv4 included


def join_address(host: str, port: int | str) -> str:
    """`10.0.0.1:29400`, `[fd00::1]:29400`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of an address made by join_address(). ValueError: malformed."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def listen(host: str, ports: Sequence[int] | None = None) -> socket.socket:
    """A socket that listens on the first free port of `ports`.

    Args:
        host: a numeric address, or EVERY_INTERFACE.
        ports: None: those of BAGUA_HVD_PORTS.
    Raises:
        OSError: no port is free, or the address is not this host's; the message names both.
    """
    if host == EVERY_INTERFACE and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"
    by_6 = ":" in host
    ports = variables.read("BAGUA_HVD_PORTS") if ports is None else ports
    for port in ports:
        try:
            return socket.create_server((host, port), family=socket.AF_INET6 if by_6 else socket.AF_INET, backlog=256,
                                        dualstack_ipv6=by_6)
        except OSError as error:
            failure = error
    where, why = join_address(host, port), failure.strerror
    if failure.errno == errno.EADDRINUSE and port > 0:      # the wording of native/transport/socket.c
        where = join_address(host, min(ports)) + (f"-{max(ports)}" if len(ports) > 1 else "")
        why = "no port of BAGUA_HVD_PORTS is free: widen the range or unset it"
    raise OSError(f"cannot listen on {where}: {why}") from failure
