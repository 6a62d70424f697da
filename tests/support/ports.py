"""A free port for a program that needs one as an argument; whether there is IPv6."""
import random
import socket
from pathlib import Path

_FIRST = 10_000


def has_ipv6():
    """Whether this machine has ::1."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def free_port():
    """An unused port of this host.

    Another program may take the port before it is used. The kernel assigns none of these to a program that names no
    port, as all others here do.
    """
    first_of_the_kernels = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(_FIRST, first_of_the_kernels)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
