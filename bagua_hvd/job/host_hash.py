"""Distinguishes hosts, and containers on one host."""
import hashlib
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

# Processes that differ in one of these namespaces do not share memory or network, although they share the kernel.
_NAMESPACES = ("ipc", "mnt", "net", "pid", "user", "uts")


def _identity():
    """The kernel's boot, and the namespaces: hosts of one name that were just started have equal namespace numbers."""
    with suppress(OSError):
        yield Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    for name in _NAMESPACES:
        with suppress(OSError):
            yield os.readlink(f"/proc/self/ns/{name}")


def host_hash(salt: Any = None) -> str:
    """Text that is equal in all processes of a host and container, and begins with the host's short name.

    Args:
        salt: processes with an equal salt form a host of their own; None: no salt.
    """
    hostname = socket.gethostname()
    text = f"{hostname}-{','.join(_identity())}" + ("" if salt is None else f"-{salt}")
    return f"{hostname.split('.')[0]}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
