"""Bytes between two ranks and nothing else, moved by a process beside each: what a link's traffic alone costs a
training whose cores do the network's work, too.

As a program: `python -m bagua_hvd.bench.traffic listen|connect ADDRESS BYTES [SECONDS]`. It exchanges BYTES with the
other end for each byte that it reads, and answers with one; or, with SECONDS, of its own accord, resting so long in
between, until it is ended.
"""
import os
import subprocess
import sys
import time

from bagua_hvd.bench import ceiling


class Traffic:
    """One of two ranks' ends; a context manager.

    Args:
        rank: 0 or 1. address: of rank 0's host.
        nbytes: sent, and received, by each exchange.
        rest: seconds between exchanges that nobody asks for; None: they happen by begin() and end().
    """

    def __init__(self, rank, address, nbytes, rest=None):
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "connect" if rank else "listen", address, str(nbytes),
             *([] if rest is None else [str(rest)])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
            stderr=subprocess.DEVNULL)      # the end that is ended last complains of the other
        assert self._process.stdin is not None and self._process.stdout is not None     # PIPE
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def begin(self):
        """Begins an exchange."""
        self._stdin.write(b".")

    def end(self):
        """Blocks until it is over. EOFError: a process ended."""
        if not self._stdout.read(1):
            raise EOFError("the traffic beside the training ended")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._process.kill()
        self._process.communicate()


def main(role, address, nbytes, rest=None):
    source, target = memoryview(bytearray(int(nbytes))), memoryview(bytearray(int(nbytes)))
    with ceiling.end_of_link(role, address) as connection:
        connection.setblocking(False)
        while rest is not None or os.read(0, 1):
            ceiling.exchange(connection, source, target)
            if rest is None:
                os.write(1, b".")
            else:
                time.sleep(float(rest))


if __name__ == "__main__":
    main(*sys.argv[1:])
