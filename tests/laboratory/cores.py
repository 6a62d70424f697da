"""How far this process' cores are from each other (native/cores.c); rounds in which none was moved."""
import math
import os
import time

from tests.laboratory.library import library

# A round counts while a line takes at most this many times as long from core to core as it ever did.
FARTHER = 1.5
PATIENCE_SECONDS = 20
REPEATED = 4


def round_trip_ns() -> int | None:
    """From the first core of this process to the last and back, through their caches; about 2 ms of both.

    None with a single core, or where threads cannot be started. 50 to 100 within a chip, 300 and more from one chip to
    another: by so much shared memory's collectives differ.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return None
    measured = library().cores_round_trip_ns(cores[0], cores[-1])
    return None if measured < 0 else int(measured)


class Nearness:
    """Whether the cores are as near to each other as they were: a virtual machine's host may move one for a while."""

    def __init__(self):
        self._least_ns = math.inf

    def _is_near(self):
        measured = [round_trip_ns() for _ in range(5)]
        now_ns = min((ns for ns in measured if ns is not None), default=0)      # one core is near itself
        self._least_ns = min(self._least_ns, now_ns)
        return now_ns <= FARTHER * self._least_ns

    def __call__(self, run):
        """What run() returned while they were near, before and after; else, the last time of REPEATED."""
        for _ in range(REPEATED):
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not (near := self._is_near()) and time.monotonic() < deadline:
                time.sleep(0.2)
            result = run()
            if near and self._is_near():
                break
        return result
