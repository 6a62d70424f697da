"""A network with rates and delays between namespaces: a process that carries packets (native/network.c).

As a program, `python -m tests.laboratory.network COUNT NAMESPACE... DEVICE...`: that process.
"""
import ctypes
import json
import os
import subprocess
import sys
import threading
from typing import NamedTuple

from bagua_hvd.bench.predict import bytes_per_s
from tests.laboratory.library import library


class Link(NamedTuple):
    """A host's link: rates in tc's notation, or "none"; delay: milliseconds between two hosts that both have it."""

    up: str
    down: str
    delay: float


class Report(NamedTuple):
    """The process's activity between two times.

    Attributes:
        share: of a core, including the kernel's work for receivers: near 1, the process was the bottleneck.
        nbytes: carried, with the overhead of TCP, IP and Ethernet.
        late_s, latest_s: how late packets were delivered, on average and at most.
    """

    share: float
    packets: int
    nbytes: int
    dropped: int
    late_s: float
    latest_s: float


class Carrier:
    """The process, until close().

    Args:
        devices: (namespace, name) of a TUN device to create for each host; namespace: a name, a path, or "": this
            process's own. The last byte of a device's address must be its index here, plus 1.
    """

    def __init__(self, devices: list[tuple[str, str]]) -> None:
        namespaces, names = zip(*devices, strict=True)
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, str(len(devices)), *namespaces, *names],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._begin = self._read()

    def _read(self):
        assert self._process.stdin and self._process.stdout and self._process.stderr        # PIPE
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the network ended: " + (self._process.stderr.read().strip() or "without a word"))
        return json.loads(line)

    def _command(self, text):
        with self._lock:
            assert self._process.stdin
            self._process.stdin.write(text + "\n")
            self._process.stdin.flush()
            return self._read()

    def set(self, host: int, link: Link) -> None:
        """Shapes a host's link; packets already on the line are not affected."""
        delay = link.delay / 2e3
        self._command(f"{host} {bytes_per_s(link.up)!r} {delay!r} {bytes_per_s(link.down)!r} {delay!r}")

    def report(self) -> Report:
        """The Report since the last one, or since the start."""
        old, new = self._begin, self._command("report")
        self._begin = new
        took = {key: new[key] - old[key] for key in new}
        return Report(took["cpu_s"] / max(took["clock_s"], 1e-9), took["packets"], took["bytes"], took["dropped"],
                      took["late_s"] / max(took["packets"], 1), new["latest_s"])

    def close(self) -> None:
        """Ends the process, and removes its devices. Idempotent."""
        self._process.communicate()


def main(arguments: list[str]) -> int:
    """Runs the process, until stdin is closed."""
    count, texts = int(arguments[0]), arguments[1:]
    run = library().network_run
    kind = ctypes.c_char_p * count
    namespaces, names = (kind(*(text.encode() for text in part)) for part in (texts[:count], texts[count:]))
    failed = run(count, namespaces, names)
    if failed:
        print(f"/dev/net/tun, in a namespace: {os.strerror(failed)}", file=sys.stderr)
    return int(failed != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
