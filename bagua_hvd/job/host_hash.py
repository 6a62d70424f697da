"""Distinguishes hosts, and containers on one host."""
import hashlib
import os
import socket
from typing import Any

# Processes that differ in one of these namespaces do not share memory or network, although they share the kernel.
_NAMESPACES = ("ipc", "mnt", "net", "pid", "user", "uts")


def _namespaces():
    found = []
    for name in _NAMESPACES:
        try:
            found.append(os.readlink(f"/proc/self/ns/{name}"))
        except OSError:
            found.append("")
    return ",".join(found)


def host_hash(salt: Any = None) -> str:
    """Text that is equal in all processes of a host and container, and begins with the host's short name.

    Args:
        salt: processes with an equal salt form a host of their own; None: no salt.
    """
    hostname = socket.gethostname()
    text = f"{hostname}-{_namespaces()}" + ("" if salt is None else f"-{salt}")
    return f"{hostname.split('.')[0]}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
