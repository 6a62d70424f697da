"""On which ports this package listens in Python; the core's ranks do so in native/transport."""
import socket
from collections.abc import Sequence

from bagua_hvd.core import variables


def listen(host: str, ports: Sequence[int] | None = None) -> socket.socket:
    """A socket that listens on the first of the ports that is free.

    Args:
        host: a numeric IPv4 address, "0.0.0.0": all.
        ports: None: those of BAGUA_HVD_PORTS.
    Raises:
        OSError: none of them is free, or the address is not of this host; the sentence names both.
    """
    for port in variables.read("BAGUA_HVD_PORTS") if ports is None else ports:
        try:
            return socket.create_server((host, port), backlog=256)
        except OSError as error:
            failure = error
    raise OSError(f"cannot listen on {host}:{port}: {failure.strerror}; more ports: BAGUA_HVD_PORTS") from failure
