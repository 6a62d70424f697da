"""Reports of a rank to the launcher besides its output: lines of its stderr, which the launcher takes out again.

A line begins with a zero byte, so no text of the script is mistaken for one; one of the messages below follows. It
takes the path of all output: a pipe on the launcher's host, ssh from others. The launcher names its pipe in the
variable PIPE: if the script's stderr is something else, such as a file, nothing is written.
"""
import os
import threading
from dataclasses import dataclass
from typing import Any

from bagua_hvd.core import variables
from bagua_hvd.job import channel

VARIABLE = "BAGUA_HVD_DASHBOARD"     # set by the launcher if it wants a Reporter
PIPE = "BAGUA_HVD_LAUNCHER_PIPE"       # "device:inode"
MARK = b"\0bagua_hvd report "
_PERIOD_SECONDS = 1


@dataclass(frozen=True)
class Figures:
    """Sent once a second with `baguarun --dashboard`: statistics.figures()."""

    figures: dict[str, int | float]


@dataclass(frozen=True)
class Stalled:
    """Sent by rank 0 with `baguarun --dashboard`, on changes: the number of operations that `rank` has not requested
    and others wait for, and the names of the first ones."""

    rank: int
    operations: int
    names: list[str]


@dataclass(frozen=True)
class BecauseOf:
    """If this process fails, the failure or departure of `rank` is the cause; None: no other rank."""

    rank: int | None


def _write(report):
    # One write below a pipe's atomic size: it does not mix with the output of other threads.
    os.write(2, MARK + channel.encode(report))


def read(line: Any) -> Any:
    """Decodes such a line after MARK. ValueError: other output got into it."""
    return channel.decode(line, Figures, Stalled, BecauseOf)


class Reporter:
    """Sends reports from construction to close(), in a thread of its own.

    facts: returns sums since the beginning, by name. stalled: as Context.stalled().
    """

    def __init__(self, facts: Any, stalled: Any) -> None:
        self._facts = facts
        self._stalled = stalled
        self._last_stalled: dict[Any, Any] = {}
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
            for rank in sorted(stalled.keys() | self._last_stalled.keys()):
                operations, names = stalled.get(rank, (0, []))
                if self._last_stalled.get(rank) != (operations, names):
                    _write(Stalled(rank, operations, names))
            self._last_stalled = stalled
        except OSError:
            pass        # stderr has no reader

    def close(self) -> None:
        """Reports a last time, with no stalled ranks, and ends the thread. Does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        self._stop.set()
        self._thread.join()
        self._report({})


_last_report = BecauseOf(None)


def report_cause(rank: int | None) -> None:
    """Tells the launcher that the end of `rank` caused that of this process; None: no other rank did."""
    global _last_report
    report = BecauseOf(rank)
    if report == _last_report:
        return
    _last_report = report
    try:
        stderr = os.fstat(2)
        if variables.read(PIPE) == f"{stderr.st_dev}:{stderr.st_ino}":
            _write(report)
    except OSError:
        pass            # no stderr
