"""What a rank tells the launcher besides its output: lines of its stderr, which the launcher takes out again.

A line begins with a zero byte, so no text of the script's is mistaken for one; then comes one of the messages below.
It goes the way of all output: a pipe on the launcher's host, ssh from others. The launcher says in PIPE which pipe that
is: where the script's stderr is something else, a file say, nothing is written.
"""
import os
import threading
from dataclasses import dataclass
from typing import Any

from bagua_hvd.core import variables
from bagua_hvd.job import channel

VARIABLE = "BAGUA_HVD_DASHBOARD"     # set by the launcher
PIPE = "BAGUA_HVD_LAUNCHER_PIPE"       # "device:inode"
MARK = b"\0bagua_hvd report "
_PERIOD_SECONDS = 1


@dataclass(frozen=True)
class Figures:
    """For `baguarun --dashboard`, once a second: statistics.figures()."""

    figures: dict[str, int | float]


@dataclass(frozen=True)
class Stalled:
    """For that too, from rank 0, when it changes: how many operations others wait for `rank` to ask for, and the names
    of the first ones."""

    rank: int
    operations: int
    names: list[str]


@dataclass(frozen=True)
class BecauseOf:
    """If this process fails, then because that rank did, or left, before; None: of its own accord."""

    rank: int | None


def _write(report):
    # One write of less than a pipe's atomic size: it does not mix with what other threads write.
    os.write(2, MARK + channel.encode(report))


def read(line: Any) -> Any:
    """What such a line says after MARK. ValueError: somebody else wrote into it."""
    return channel.decode(line, Figures, Stalled, BecauseOf)


class Reporter:
    """Reports from construction to close(), in a thread of its own.

    Args:
        facts: function without arguments that returns numbers, by name: sums since the beginning.
        stalled: function that returns what Context.stalled() does.
    """

    def __init__(self, facts: Any, stalled: Any) -> None:
        self._facts = facts
        self._stalled = stalled
        self._told: dict[Any, Any] = {}
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bagua_hvd reports", daemon=True)
        self._thread.start()

    def _run(self):
        while not self._stop.wait(_PERIOD_SECONDS):
            self._report(self._stalled())

    def _report(self, stalled):
        try:
            _write(Figures(self._facts()))
            for rank in sorted(stalled.keys() | self._told.keys()):
                operations, names = stalled.get(rank, (0, []))
                if self._told.get(rank) != (operations, names):
                    _write(Stalled(rank, operations, names))
            self._told = stalled
        except OSError:
            pass        # nobody reads stderr

    def close(self) -> None:
        """Reports once more, that nobody stalls, and ends the thread. Nothing in a forked child, which has none."""
        if os.getpid() != self._pid:
            return
        self._stop.set()
        self._thread.join()
        self._report({})


def start(facts: Any, stalled: Any) -> Any:
    """A Reporter, if the launcher asked for one; else None."""
    return Reporter(facts, stalled) if variables.read(VARIABLE) else None


_told = BecauseOf(None)


def because_of(rank: int) -> None:
    """Tells the launcher whose end came before this process's, and caused it: so that it names the right one.

    Args:
        rank: that one's; None: this process ends of its own accord.
    """
    global _told
    report = BecauseOf(rank)
    if report == _told:
        return
    _told = report
    try:
        stderr = os.fstat(2)
        if variables.read(PIPE) == f"{stderr.st_dev}:{stderr.st_ino}":
            _write(report)
    except OSError:
        pass            # no stderr
