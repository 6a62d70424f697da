"""The distance between this process's cores (native/cores.c), and rounds in which none was moved."""
import math
import os
import time

from tests.laboratory.library import library

# A round counts if a cache line takes at most this many times its minimum from core to core.
FARTHER = 1.5
PATIENCE_SECONDS = 20
REPEATED = 4


def round_trip_ns() -> int | None:
    """Round trip from this process's first core to its last one, through their caches; takes about 2 ms.

    None with a single core, or if threads cannot be started. 50 to 100 within a chip, 300 and more between chips;
    shared-memory collectives differ by the same factor.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return None
    measured = library().cores_round_trip_ns(cores[0], cores[-1])
    return None if measured < 0 else int(measured)


class Nearness:
    """Whether the cores are as close as before: the host of a virtual machine may move one temporarily."""

    def __init__(self):
        self._least_ns = math.inf

    def _is_near(self):
        measured = [round_trip_ns() for _ in range(5)]
        now_ns = min((ns for ns in measured if ns is not None), default=0)      # one core has no distance
        self._least_ns = min(self._least_ns, now_ns)
        return now_ns <= FARTHER * self._least_ns

    def __call__(self, run):
        """The result of run() with close cores before and after; otherwise, that of the last of REPEATED tries."""
        for _ in range(REPEATED):
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not (near := self._is_near()) and time.monotonic() < deadline:
                time.sleep(0.2)
            result = run()
            if near and self._is_near():
                break
        return result
